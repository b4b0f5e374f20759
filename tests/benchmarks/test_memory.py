"""Predicted peaks of `raypo plan` against measured ones, each role in a process of its own on CPU.

Ratios predicted / measured are printed (`-s` shows them). A model of 135 million weights has the
shape of SmolLM2-135M and random weights: memory knows no difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from raypo.config import PPOConfig
from raypo.plan import estimate
from raypo.plan.estimate import Models
from raypo.plan.memory import Sharding

SHAPES = {"25M": {"vocab_size": 8192, "num_hidden_layers": 6}, "135M": {}}
ROWS, PROMPT, RESPONSE, MICROBATCH = 8, 128, 128, 512
TOLERANCE = 0.15


@pytest.fixture(scope="module", params=SHAPES)
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    config = LlamaConfig(**(sizes | SHAPES[request.param]), tie_word_embeddings=True)
    config.dtype = torch.float32
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return request.param, folder


def measured(role: str, folder: Path, **changes: Any) -> dict[str, int]:
    config = json.loads((folder / "config.json").read_text())
    task = {
        "role": role,
        "model": str(folder),
        "dtype": "float32",
        "advantage": "reinforce",
        "max_tokens": MICROBATCH,
        "deepspeed": {},
        "rows": ROWS,
        "prompt": PROMPT,
        "response": RESPONSE,
        "vocabulary": config["vocab_size"],
    } | changes
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.memory_probe", json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_config(folder: Path) -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": str(folder)},
            "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": PROMPT},
            "rollout": {
                "prompts_per_step": ROWS,
                "samples_per_prompt": 1,
                "max_new_tokens": RESPONSE,
            },
            "ppo": {"advantage": "reinforce", "minibatch_size": ROWS // 2},
            "learner": {"max_tokens_per_microbatch": MICROBATCH},
        }
    )


def compare(what: str, predicted: int, peak: int) -> None:
    print(f"\n{what}: {predicted / 1e6:.0f} / {peak / 1e6:.0f} MB = {predicted / peak:.2f}")
    assert predicted == pytest.approx(peak, rel=TOLERANCE)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update(model: tuple[str, Path], stage: int):
    name, folder = model
    config = run_config(folder)
    memory = estimate.learner(config, Models.read(config), Sharding(stage), "cpu")
    predicted = memory.steady - memory.held["runtime"] + memory.added("update")
    peak = measured("learner", folder, stage=stage)["update"]
    compare(f"update, {name}, stage {stage}", predicted, peak)


def test_a_reference(model: tuple[str, Path]):
    name, folder = model
    config = run_config(folder)
    shape = Models.read(config).policy
    memory = estimate.frozen(config, shape, "cpu", None, section=config.placement.frozen.reference)
    predicted = memory.steady - memory.held["runtime"] + memory.added("score")
    compare(f"reference, {name}", predicted, measured("reference", folder)["forward"])
