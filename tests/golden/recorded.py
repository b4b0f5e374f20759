"""Golden figures: what two tiny runs in their first steps, and two single updates, once gave.

`learner_step.json` is of one update in float64 on rollouts made by hand, without Ray, vLLM or
DeepSpeed (tests/unit/test_golden.py). `runs.json` is of two whole runs (tests/integration/
test_golden.py). A change that moves a number on purpose renews both, and says why:

    python -m tests.golden.renew
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raypo import PPOConfig, PPOTrainer
from raypo.config import PPOSection
from raypo.storage.run_files import RunFiles
from tests.integration.task import NOT_NUMBERS
from tests.unit.learner.plain import one_step, plain_models

FOLDER = Path(__file__).parent
LEARNER_STEP, RUNS = FOLDER / "learner_step.json", FOLDER / "runs.json"

SECTIONS: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 6, "num_epochs": 2, "entropy_coef": 0.01, "kl": {"coef": 0.05}},
    "grpo": {"preset": "grpo", "minibatch_size": 6, "num_epochs": 2},
}
"""Of the single updates: a critic and the KL in the reward; a group and the KL in the loss."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {"ppo.preset": "grpo", "ppo.kl.coef": 0.04},
}
"""Of the runs, on top of the tests' task."""
COMMON = {"num_steps": 2, "eval.prompts": None, "checkpoint.every": 100}

Figures = dict[str, float]


def learner_steps() -> dict[str, Figures]:
    """The figures of each single update."""
    with plain_models():
        return {
            name: one_step(PPOSection.model_validate(section)).figures
            for name, section in SECTIONS.items()
        }


def config_of(task: Path, name: str) -> PPOConfig:
    return PPOConfig.load(task, COMMON | OVERRIDES[name] | {"name": f"golden-{name}"})


def run(task: Path, name: str) -> list[dict[str, Any]]:
    """Each step's figures and sampled responses of a run; Ray is up."""
    config = config_of(task, name)
    PPOTrainer(config).fit()
    return steps_of(RunFiles(config.storage_path, config.name))


def steps_of(files: RunFiles) -> list[dict[str, Any]]:
    """Return each step's figures and sampled responses of a run that is finished."""
    return [
        {
            "responses": responses_of(files, row["step"]),
            "figures": {
                key: value
                for key, value in row.items()
                if not key.startswith((*NOT_NUMBERS, "mismatch/"))  # rounding of two programs
            },
        }
        for row in files.metrics()
    ]


def responses_of(files: RunFiles, step: int) -> list[int]:
    """A checksum of each sampled response's ids, in the order of prompts and samples."""
    rows = files.rollouts(step)
    return [zlib.crc32(repr(list(map(int, row["response_ids"]))).encode()) for row in rows]


def read(path: Path) -> dict[str, Any]:
    """What was recorded."""
    return json.loads(path.read_text())


def differences(
    found: Figures, golden: Figures, tolerances: Mapping[str, tuple[float, float]]
) -> list[str]:
    """Each recorded figure that is gone or too far off, in words; a new one moves no number.

    Args:
        tolerances: Name -> relative and absolute tolerance; `*` for those that are not named.
    """
    told = [f"{name} is gone" for name in sorted(golden.keys() - found.keys())]
    for name in sorted(found.keys() & golden.keys()):
        relative, absolute = tolerances.get(name, tolerances["*"])
        expected = pytest.approx(golden[name], rel=relative, abs=absolute, nan_ok=True)
        if found[name] != expected:
            told.append(f"{name}: {found[name]!r}, recorded {golden[name]!r}")
    return told
