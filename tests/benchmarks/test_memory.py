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
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from raypo.cluster.placement import LEARNER, served_roles
from raypo.config import PPOConfig
from raypo.learner.deepspeed_config import Sharding
from raypo.models.model_shape import Models
from raypo.plan.estimate import roles_of
from tests.tiny import tiny_tokenizer

SHAPES = {"25M": {"vocab_size": 9216, "num_hidden_layers": 6}, "135M": {}}
ROWS, PROMPT, RESPONSE, MICROBATCH = 8, 128, 128, 512
TOLERANCE = 0.15
LORA = {"model": {"lora": {"rank": 16, "alpha": 32}}}
BFLOAT16 = {"model": {"dtype": "bfloat16"}}
CRITIC = {"ppo": {"advantage": "gae"}}
THREE_PROCESSES = {
    "rollout": {"engine": {"tensor_parallel": 3}},
    "placement": {"mode": "dedicated"},
}


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
    config.pad_token_id = 0
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "reward")
    for each in (folder, folder / "reward"):
        tiny_tokenizer(each)
    return request.param, folder


def run_config(folder: Path, changes: dict[str, Any]) -> PPOConfig:
    values = {
        "name": "run",
        "model": {"policy": str(folder)},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": PROMPT},
        "rollout": {"prompts_per_step": ROWS, "samples_per_prompt": 1, "max_new_tokens": RESPONSE},
        "ppo": {"advantage": "reinforce", "minibatch_size": ROWS // 2},
        "learner": {"max_tokens_per_microbatch": MICROBATCH, "policy_lr": 1e-6, "critic_lr": 1e-6},
    }
    for section, keys in changes.items():
        values[section] = {**values.get(section, {}), **keys}
    return PPOConfig.parse(values).with_dtype(use_gpu=False)


def measured(role: str, config: PPOConfig) -> dict[str, int]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.benchmarks.memory_probe",
            role.split()[0],
            config.model_dump_json(),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def predicted(role: str, config: PPOConfig) -> Any:
    """The role's memory, as `raypo plan` computes it for this config."""
    sharding = Sharding.of(config.learner, dtype=config.model.dtype, num_workers=1)
    roles = roles_of(config, Models.read(config), sharding, "cpu", None)
    return next(each.memory for each in roles if each.name == role)


def compare(what: str, role: str, config: PPOConfig, worst: str) -> None:
    """Prints every phase, of all processes of a replica; the worst decides whether a run fits."""
    peaks, memory = measured(role, config), predicted(role, config)
    phases = [phase for phase in peaks if phase != "first_update"]  # an update like the next
    served = served_roles(config, num_workers=1, use_gpu=False)
    size = {each.name: each.num_devices for each in served}.get(role, 1)
    needed = {phase: size * (memory.steady + memory.added(phase)) for phase in phases}
    for phase in phases:
        peak = peaks[phase]
        ratio = needed[phase] / peak
        print(f"\n{what}, {phase}: {needed[phase] / 1e6:.0f} / {peak / 1e6:.0f} MB = {ratio:.2f}")
        assert ratio >= 1 - TOLERANCE
    assert needed[worst] == pytest.approx(max(peaks.values()), rel=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "changes", "stages"),
    [
        ("weights", {}, (0, 1, 2, 3)),
        ("critic", CRITIC, (2,)),
        ("adapter", LORA, (2,)),
        ("bfloat16", BFLOAT16, (0, 2)),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_learner(model: tuple[str, Path], name: str, changes: Any, stages: tuple[int, ...]):
    for stage in stages:
        config = run_config(model[1], {**changes, "learner": {"zero_stage": stage}})
        compare(f"{name}, {model[0]}, stage {stage}", LEARNER, config, "update")


def test_frozen_models(model: tuple[str, Path]):
    config = run_config(model[1], {"model": {"reward": str(model[1] / "reward")}})
    for role in ("reference", "reward_0"):
        compare(f"{role}, {model[0]}", role, config, "score")


@pytest.mark.parametrize(
    "changes", [{}, BFLOAT16, THREE_PROCESSES], ids=["float32", "bfloat16", "tensor parallel"]
)
def test_an_engine(model: tuple[str, Path], changes: dict[str, Any], request: Any):
    config = run_config(model[1], changes)
    compare(f"{request.node.name}", "engine", config, "push")
