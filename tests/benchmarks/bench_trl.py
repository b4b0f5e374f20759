"""TRL's GRPOTrainer on the benchmark's work, in its own environment: `python bench_trl.py JSON`.

Alone in its file, because that environment has TRL and no raypo. The last line that it prints is a
JSON object: what each step took, in seconds, by phase.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import sys
import time
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def number_of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepTimes(TrainerCallback):
    """Seconds between the ends of steps, and what part of them each phase took."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.phases: dict[str, float] = {}
        self._last = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._last = self._last or now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        end = now()
        self.steps.append({"step_s": end - self._last, **self.phases})
        self.phases, self._last = {}, end

    def watch(self, owner: Any, method: str, phase: str) -> None:
        """Book what a method takes under a phase, where no gradient is asked for."""
        inner = getattr(owner, method)

        @wraps(inner)
        def timed(*arguments: Any, **more: Any) -> Any:
            begin = now()
            result = inner(*arguments, **more)
            if phase == "generate_s" or not torch.is_grad_enabled():
                taken = now() - begin
                self.phases[phase] = self.phases.get(phase, 0.0) + taken
            return result

        setattr(owner, method, timed)


def main(work: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    on_gpu = work.get("device") == "cuda"
    if on_gpu:  # vLLM in the trainer's process joins its process group
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    else:
        torch.set_num_threads(work["threads"])
    engine: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": work.get("fraction"),
        "vllm_max_model_length": work["prompt_tokens"] + work["new_tokens"],
    }
    rows = [json.loads(line) for line in Path(work["prompts_file"]).read_text().splitlines()]
    responses = work["prompts"] * work["samples"]
    bf16 = work["dtype"] == "bfloat16"
    config = GRPOConfig(
        output_dir=work["folder"],
        use_cpu=not on_gpu,
        bf16=bf16,
        per_device_train_batch_size=work.get("batch", responses),
        gradient_accumulation_steps=responses // work.get("batch", responses),
        gradient_checkpointing=False,
        num_generations=work["samples"],
        max_completion_length=work["new_tokens"],
        max_steps=work["steps"],
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=work["kl_coef"],
        loss_type="grpo",
        optim="adamw_torch_fused",
        model_init_kwargs={"dtype": work.get("weights", "float32"), "attn_implementation": "sdpa"},
        cache_implementation=work.get("cache"),
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
        seed=0,
        **(engine if on_gpu else {}),
    )
    trainer = GRPOTrainer(
        model=work["model"],
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        reward_funcs=number_of_letters,
        args=config,
        train_dataset=Dataset.from_list(rows),
    )
    times = StepTimes()
    times.watch(trainer, "_generate_single_turn", "generate_s")
    times.watch(trainer, "_get_per_token_logps_and_entropies", "reference_s")
    trainer.add_callback(times)
    start_s = time.perf_counter() - begin
    trainer.train()
    for step in times.steps:
        step["update_s"] = step["step_s"] - step["generate_s"] - step.get("reference_s", 0.0)
    return {"start_s": start_s, "steps": times.steps}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
