"""A hang in each phase of a run is found, named and ended; a slow run that goes on is not.

Two learner workers, an engine and a reference model of their own, files at a URI.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import pid_of, read_metrics
from tests.slow.hanging import PHASES
from tests.slow.test_ahead_matrix import ray_of_six

__all__ = ["ray_of_six"]

pytestmark = pytest.mark.usefixtures("ray_of_six")

TIMEOUT_S = 12.0
"""Longer than any part of a step takes on a busy machine."""
NAMED = {
    "sampling": "learner worker 0 waits in sampling for engine 0 (submit)",
    "reward": "learner worker 0 does not go on in scoring > the reward function "
    "tests.slow.hanging.reward (32 responses), in hang (hanging.py:",
    "scoring": "learner worker 0 waits in scoring for reference 0 (log_probs)",
    "update": "learner worker 1 does not go on in step 1 > the update, in hang (hanging.py:",
    "push": "learner worker 0 waits in step 1 > the push of the weights for engine 0 (load_bucket)",
    "evaluation": "learner worker 0 waits in step 1 > the evaluation for engine 0 (submit)",
    "collective": "learner worker 1 does not go on in step 1, in hang (hanging.py:",
    "checkpoint": "learner worker 0 does not go on in writing the checkpoint of step 1, in hang",
    "upload": "learner worker 0 does not go on in storing the checkpoint of step 1 in file:///",
    "controller": " > the report to Ray Train, in Condition.wait (",
    "worker": "learner worker 1 does not answer: its process is stopped or blocked",
}
"""Words of the message about the hang in each phase."""
WAITS = {
    "update": "learner worker 0 waits in step 1 > the update, in the collective all_reduce (",
    "collective": "learner worker 0 waits in step 1, in the collective broadcast (",
}


def config_of(task: Path, name: str, **keys: Any) -> PPOConfig:
    return PPOConfig.load(
        task,
        {
            "name": name,
            "storage_path": f"file://{task.parent}/uri",
            "reward.function": "tests.slow.hanging:reward",
            "callbacks": ["tests.slow.hanging:after_step"],
            "learner.num_workers": 2,
            "placement.mode": "dedicated",
            "placement.hang_timeout_s": TIMEOUT_S,
            "placement.deployment.health_check_period_s": 1.0,
            "placement.deployment.health_check_timeout_s": 300.0,
            "checkpoint.every": 1,
            "eval.every": 1,
            **keys,
        },
    )


def test_a_run_that_is_slow_in_every_phase_has_no_hang(task: Path):
    """Its reward function takes longer than the limit for a step, and so do its engine and its
    update."""
    config = config_of(task, "slow", num_steps=2, **{"rollout.max_new_tokens": 100})
    is_over = threading.Event()

    def slow_down_engine() -> None:
        pid = pid_of("raypo:slow:engine:0")
        while not is_over.wait(0.1):
            os.kill(pid, signal.SIGSTOP)
            is_over.wait(3.0)
            os.kill(pid, signal.SIGCONT)

    beside = threading.Thread(target=slow_down_engine)
    beside.start()
    try:
        assert PPOTrainer(config).fit().return_value == {"status": "finished", "step": 2}
    finally:
        is_over.set()
        beside.join()
    folder = task.parent / "uri" / "slow"
    for row in read_metrics(folder):
        print({name: value for name, value in row.items() if name.startswith("time/")})
        assert row["time/generate_s"] > TIMEOUT_S
        assert row["time/score_s"] > TIMEOUT_S
        assert row["time/update_s"] > TIMEOUT_S
    assert not (folder / "hangs").exists()


def test_a_hang_in_each_phase_is_found_and_named_and_the_run_resumes(
    task: Path, capsys: pytest.CaptureFixture[str]
):
    config = config_of(
        task,
        "hangs",
        num_steps=4,
        max_failures=len(PHASES),
        **{"placement.deployment.max_restarts": len(PHASES)},
    )
    assert PPOTrainer(config).fit().return_value == {"status": "finished", "step": 4}
    folder = task.parent / "uri" / "hangs"
    record = (task.parent / "hung.txt").read_text().splitlines()
    planted = [line.split() for line in record]
    assert [phase for phase, _ in planted] == PHASES
    out = " ".join(capsys.readouterr().out.split())
    print(out)
    reports = sorted((folder / "hangs").iterdir())
    assert len(reports) == len(PHASES)
    for (phase, at), report in zip(planted, reports, strict=True):
        message = (report / "what.txt").read_text()
        print(phase, message)
        assert NAMED[phase] in message, phase
        assert WAITS.get(phase, "") in message, phase
        assert (report / "what.txt").stat().st_mtime - float(at) < 2 * TIMEOUT_S, phase
        stacks = {path.name: path.read_text() for path in report.iterdir()}
        for role in ("driver", "learner_worker_0", "learner_worker_1", "TrainController"):
            assert any(name.startswith(role) for name in stacks), (role, sorted(stacks))
