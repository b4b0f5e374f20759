"""Prints the table of docs/scale.md: what `raypo plan` says of three sizes on three clusters.

Run it: python -m scripts.scale_table
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from raypo.cluster.hardware import GB, parse_cluster
from raypo.config import PPOConfig
from raypo.plan.fit import OFF_LOAD, Plan, make_plan
from raypo.plan.times import Rates, faster, step_time

QWEN = {"model_type": "qwen2", "tie_word_embeddings": False}
SIZES: dict[str, dict[str, Any]] = {
    "7B": {
        "vocab_size": 152_064,
        "hidden_size": 3_584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "32B": {
        "vocab_size": 152_064,
        "hidden_size": 5_120,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
    "70B": {
        "vocab_size": 152_064,
        "hidden_size": 8_192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}
"""Qwen2.5 7B, 32B and 72B."""
TENSOR_PARALLEL = {"7B": 1, "32B": 4, "70B": 8}
GPUS = (8, 64, 512)
NODE = "8xH100,2000G"
OFF_LOADED = "32B, optimizer in RAM"
"""What fits on one node of what else does not."""


def plan(folder: Path, name: str, gpus: int) -> Plan:
    """GRPO with a KL penalty: 4,096 responses of up to 2,048 tokens a step, two updates."""
    size = name.partition(",")[0]
    path = folder / size
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**QWEN, **SIZES[size]}))
    parallel = TENSOR_PARALLEL[size]
    frozen = {"backend": "vllm", "tensor_parallel": parallel} if parallel > 1 else {}
    values = {
        "name": "scale",
        "model": {"policy": str(path)},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 1024},
        "rollout": {
            "prompts_per_step": 512,
            "samples_per_prompt": 8,
            "max_new_tokens": 2048,
            "engine": {"tensor_parallel": parallel, "gpu_memory_fraction": 0.6},
        },
        "ppo": {"advantage": "grpo", "minibatch_size": 2048},
        "learner": {
            "num_workers": gpus,
            "zero_stage": 3,
            "max_tokens_per_microbatch": 8192,
            "activation_checkpointing": True,
            "deepspeed": OFF_LOAD if name == OFF_LOADED else {},
        },
        "placement": {"frozen": {"reference": frozen}},
    }
    nodes = parse_cluster(f"{NODE},{gpus // 8}")
    return make_plan(PPOConfig.parse(values), nodes)


HEAD = (
    "| model | GPUs | seconds a step | generate | update | fullest GPU, GB | RAM of a node, GB "
    "| moved by each GPU, GB | longest, limited by | one key that helps |",
    "|" + "---|" * 10,
)


def rows(counts: tuple[int, ...] = GPUS) -> list[str]:
    """Lines of a Markdown table, without its head."""
    with tempfile.TemporaryDirectory() as folder:
        asked = [(size, gpus) for size in SIZES for gpus in counts] + [(OFF_LOADED, 8)]
        return [_row(*each, plan(Path(folder), *each)) for each in asked]


def _row(size: str, gpus: int, made: Plan) -> str:
    rates = Rates.of(made)
    assert rates is not None, "the kind of the GPUs is said"
    step = step_time(made, rates)
    seconds = {each.phase: each.seconds for each in step.phases}
    full = {
        kind: max(load.needed for load in made.loads if kind in load.name) / GB
        for kind in ("GPU", "RAM")
    }
    moved = sum(each.moved for each in step.phases) / GB
    changes = faster(made)
    told = "`{}`: {:.0f} s".format(*changes[0]) if changes else "-"
    fits = "" if made.holds else ", does not fit"
    return (
        f"| {size} | {gpus} | {step.seconds:.0f}{fits} | {seconds['generate']:.0f} | "
        f"{seconds['update']:.0f} | {full['GPU']:.0f} | {full['RAM']:.0f} | {moved:,.0f} | "
        f"{step.longest.phase}, {step.longest.limit} | {told} |"
    )


if __name__ == "__main__":
    print("\n".join([*HEAD, *rows()]))
