"""Tiny mixtures of experts, runs of them, and plain vLLM under an exported one.

`python -m tests.integration.experts FOLDER TEXT` prints what plain vLLM samples after a text, and
the log-probs, as JSON.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypo import (
    DPOConfig,
    DPOTrainer,
    PPOConfig,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
)
from tests.integration.pipeline import dpo_values, sft_values, write_rows
from tests.integration.task import REPOSITORY
from tests.tiny import tiny_experts

ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral")
RECIPES = ("ppo", "grpo", "sft", "dpo")
DTYPES = ("float32", "bfloat16")


def write(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write the examples of a pipeline, with a mixture of experts as its policy."""
    tiny_experts(folder / "model", architecture, **changes)
    write_rows(folder)
    return folder


def values(folder: Path, recipe: str, dtype: str, **changes: Any) -> dict[str, Any]:
    """Run of two steps, with a checkpoint after each."""
    if recipe in ("sft", "dpo"):
        of_recipe = {"sft": sft_values, "dpo": dpo_values}[recipe]
        made = of_recipe(folder, lr_schedule="constant")  # a longer run has the same rates
        made["checkpoint"] = {"every": 1}
        made["eval"]["every"] = 2
    else:
        made = {
            "storage_path": f"{folder}/runs",
            "model": {"policy": f"{folder}/model"},
            "data": {"prompts": f"{folder}/train.jsonl", "max_prompt_tokens": 16},
            "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 8},
            "reward": {"function": "tests.integration.task:digit_share"},
            "ppo": {"preset": "grpo"} if recipe == "grpo" else {"minibatch_size": 16},
            "learner": {"policy_lr": 1e-3, "max_tokens_per_microbatch": 128},
            "checkpoint": {"every": 1},
        }
        if recipe == "ppo":
            made["learner"]["critic_lr"] = 1e-3
    made["model"]["dtype"] = dtype
    return made | {"name": f"{recipe}-{dtype}", "num_steps": 2} | changes


def fit(folder: Path, recipe: str, dtype: str, **changes: Any) -> Path:
    """Run or resume a run; returns its folder."""
    trainer, config = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
    }.get(recipe, (PPOTrainer, PPOConfig))
    trainer(config.parse(values(folder, recipe, dtype, **changes))).fit()
    return folder / "runs" / changes.get("name", f"{recipe}-{dtype}")


def gap_of_plain_vllm(folder: Path) -> float:
    """Return the largest gap between log-probs of plain vLLM and transformers, in nats."""
    text = "3+4="
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.experts", str(folder), text],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sampled, log_probs = json.loads(done.stdout.splitlines()[-1])
    prompt = AutoTokenizer.from_pretrained(folder)(text).input_ids
    ids = torch.tensor([prompt + sampled])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        log_p = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = log_p.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((own - torch.tensor(log_probs)).abs().max())


def main() -> None:
    """Sample from a folder with plain vLLM."""
    from raypo.serving.vllm_settings import import_vllm, prepare_environment

    prepare_environment(eager=True)
    import_vllm()
    from vllm import LLM, SamplingParams

    folder, text = sys.argv[1:]
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 26
    )
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=16, ignore_eos=True, logprobs=0)
    output: Any = llm.generate(text, params)[0].outputs[0]
    ids = list(output.token_ids)
    log_probs = [step[token].logprob for token, step in zip(ids, output.logprobs, strict=True)]
    print(json.dumps([ids, log_probs]))


if __name__ == "__main__":
    main()
