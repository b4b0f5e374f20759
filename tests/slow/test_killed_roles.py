"""SIGKILL of each role in each phase of a step changes no figure and no weight of a run.

docs/reliability.md has the table.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from ray.train import TrainingFailedError

from raypo import PPOConfig, PPOTrainer
from raypo.custom.in_subprocess import descendants, kill
from tests.integration.task import numbers, pid_of, raypo, read_metrics, wait_for_steps
from tests.integration.test_vllm_frozen import tiny_reward_model
from tests.slow.killed_roles import KILLED, PHASES
from tests.slow.test_ahead_matrix import ray_of_six

__all__ = ["ray_of_six"]

pytestmark = pytest.mark.usefixtures("ray_of_six")

NUM_STEPS = len(PHASES) + 1
ROLES = [role for role in KILLED if role != "driver"]
TIMEOUT_S = 300


VARIANTS: dict[str, dict[str, Any]] = {
    "sync": {"learner.num_workers": 2},
    "async": {"rollout.mode": "async", "rollout.max_staleness": 0, "learner.num_workers": 1},
}
"""Without staleness, an asynchronous run has the figures of a synchronous one."""


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def keys(variant: str, task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Learner workers beside an engine, a reference and a reward model of their own."""
    values = dedicated_keys(task, tmp_path_factory.mktemp("reward"))
    return values | VARIANTS[variant] | {"storage_path": f"{task.parent}/runs-{variant}"}


def dedicated_keys(task: Path, folder: Path) -> dict[str, Any]:
    """Return the keys of the run, whose reward model is written to a folder."""
    return {
        "num_steps": NUM_STEPS,
        "model.reward": str(tiny_reward_model(folder / "model", task.parent / "policy")),
        "placement.mode": "dedicated",
        "placement.deployment.max_restarts": len(PHASES),
        "learner.num_workers": 2,
        "eval.every": 1,
        "checkpoint.every": 1,
        "max_failures": len(PHASES),
    }


def outcome(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    return numbers(read_metrics(folder)), (folder / "policy/model.safetensors").read_bytes()


def train(task: Path, keys: dict[str, Any], name: str) -> Path:
    config = PPOConfig.load(task, keys | {"name": name})
    ended = {"status": "finished", "step": config.num_steps}
    assert PPOTrainer(config).fit().return_value == ended
    return Path(config.storage_path) / name


@pytest.fixture(scope="module")
def undisturbed(task: Path, keys: dict[str, Any], ray_of_six: None) -> Any:
    return outcome(train(task, keys, "undisturbed"))


def phases_of_kills(folder: Path) -> list[str]:
    return (folder / "killed.txt").read_text().splitlines()


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_is_killed_in_each_phase_changes_no_figure(
    role: str, variant: str, task: Path, keys: dict[str, Any], undisturbed: Any
):
    if role == "worker_1" and keys["learner.num_workers"] == 1:
        pytest.skip("it has one worker")
    folder = train(task, keys | {"callbacks": ["tests.slow.killed_roles:between"]}, role)
    assert phases_of_kills(folder) == PHASES
    assert outcome(folder) == undisturbed


def test_a_driver_that_is_killed_in_each_phase_goes_on_when_it_is_started_again(
    task: Path, keys: dict[str, Any], undisturbed: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # it starts a Ray of its own
    values = keys | {"callbacks": "[tests.slow.killed_roles:between]"}
    arguments = [f"{key}={value}" for key, value in values.items()]
    folder = Path(keys["storage_path"]) / "driver"
    for number in range(len(PHASES) + 1):
        command = raypo("train", task, "name=driver", *arguments)
        try:
            out, error = command.communicate(timeout=TIMEOUT_S)
        finally:  # after a timeout, else it has ended
            if command.poll() is None:
                kill(command.pid, *descendants(command.pid))
        assert len(phases_of_kills(folder)) == min(number + 1, len(PHASES)), out + error
        assert command.returncode == (-9 if number < len(PHASES) else 0), error
    assert phases_of_kills(folder) == PHASES
    assert outcome(folder) == undisturbed


def test_a_dedicated_role_that_is_not_restarted_any_more_ends_the_run_with_the_reason(
    task: Path, ray_of_six: None, capsys: pytest.CaptureFixture[str]
):
    """Without the reason in the first place, `max_failures: -1` would repeat it for ever."""
    keys = {
        "name": "gone",
        "num_steps": 50,
        "placement.mode": {"engine": "dedicated"},
        "placement.deployment.max_restarts": 0,
        "max_failures": -1,
    }
    folder = task.parent / "runs" / "gone"

    def kill_the_engine() -> None:
        wait_for_steps(folder, 1)
        kill(pid_of("raypo:gone:engine:0"))

    beside = threading.Thread(target=kill_the_engine, daemon=True)
    beside.start()
    with pytest.raises(TrainingFailedError, match=r"no replica is left\..* max_restarts \(0\)"):
        PPOTrainer(PPOConfig.load(task, keys)).fit()
    beside.join(timeout=30)
    told = capsys.readouterr().out
    assert told.count("starting the engine") == 1, "the second attempt loads nothing"
    assert "raypo: failed after" in told
