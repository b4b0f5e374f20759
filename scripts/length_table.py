"""Prints the table of docs/long-responses.md: the longest response that fits, by `raypo plan`.

Run it: python -m scripts.length_table
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypo.cluster.hardware import parse_cluster
from raypo.config import PPOConfig
from raypo.plan.fit import OFF_LOAD, TILE
from raypo.plan.longest import LENGTHS, longest_response
from scripts.scale_table import QWEN, SIZES, TENSOR_PARALLEL

SHAPES = {
    "0.5B": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "7B": SIZES["7B"],
    "32B": SIZES["32B"],
}
"""Qwen2.5 0.5B, 7B and 32B."""
GPUS = (1, 8, 64)
TILED = {"learner.activation_checkpointing": "offload", "learner.mlp_tile_tokens": TILE}
HEAD = (
    "| model | GPUs | activation_checkpointing: true | offload, and mlp_tile_tokens: 4096 "
    "| and sequence_parallel: 8 |",
    "|" + "---|" * 5,
)


def run_config(folder: Path, size: str, gpus: int) -> PPOConfig:
    """Return a config of GRPO: 512 responses a step, two updates."""
    path = folder / size
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**QWEN, **SHAPES[size]}))
    parallel = min(gpus, TENSOR_PARALLEL.get(size, 1))
    values = {
        "name": "long",
        "model": {"policy": str(path)},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 1024},
        "rollout": {
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "engine": {"tensor_parallel": parallel},
        },
        "ppo": {"advantage": "grpo", "kl": {"coef": 0.0}, "minibatch_size": 256},
        "learner": {"num_workers": gpus, "zero_stage": 3, "activation_checkpointing": True},
    }
    return PPOConfig.parse(values)


def rows(sizes: Sequence[str] = tuple(SHAPES), counts: Sequence[int] = GPUS) -> list[str]:
    """Lines of a Markdown table, without its head."""
    with tempfile.TemporaryDirectory() as folder:
        return [_row(Path(folder), size, gpus) for size in sizes for gpus in counts]


def _row(folder: Path, size: str, gpus: int) -> str:
    config = run_config(folder, size, gpus)
    ways: list[dict[str, Any]] = [{}, TILED]
    if gpus > 1:
        ways.append({**TILED, "learner.sequence_parallel": 8})
    cells = [_cell(config, gpus, changes) for changes in ways]
    cells += ["-"] * (3 - len(cells))
    return f"| {size} | {gpus} | {' | '.join(cells)} |"


def _cell(config: PPOConfig, gpus: int, changes: dict[str, Any]) -> str:
    nodes = parse_cluster(f"{min(gpus, 8)}xH100,2000G,{-(-gpus // 8)}")
    if tokens := longest_response(config, nodes, changes):
        return f"at least {tokens:,}" if tokens == LENGTHS[-1] else f"{tokens:,}"
    tokens = longest_response(config, nodes, {"learner.deepspeed": OFF_LOAD, **changes})
    return f"{tokens:,}, optimizer in RAM" if tokens else "does not fit"


if __name__ == "__main__":
    print("\n".join([*HEAD, *rows()]))
