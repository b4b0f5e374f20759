"""Each process that a run has started is killed on the way; no figure tells it afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer
from raypo.deployment.spec import Call
from tests.integration.task import kill_train_workers, numbers, pid_of, read_metrics, wait_for_steps
from tests.integration.test_vllm_frozen import tiny_reward_model

pytestmark = pytest.mark.usefixtures("local_ray")

NUM_STEPS = 6
STANDS_STILL_S = 3.0
"""Longer than a step without the call that waits."""


@pytest.fixture(scope="module")
def config(task: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """An engine, a reference, a reward model, one learner worker."""
    folder = tmp_path_factory.mktemp("reward")
    model = str(tiny_reward_model(folder / "model", task.parent / "policy"))
    return PPOConfig.load(task, {"num_steps": NUM_STEPS, "model.reward": model})


def run(config: PPOConfig, name: str, disturb: Callable[[Path], None] | None = None) -> list[Any]:
    """The figures of all steps."""
    folder = Path(config.storage_path) / name
    failed: list[BaseException] = []

    def thread() -> None:
        try:
            if disturb is not None:
                disturb(folder)
        except BaseException as error:  # told by the test
            failed.append(error)

    beside = threading.Thread(target=thread, daemon=True)
    beside.start()
    failures = FailureConfig(max_failures=2)
    trainer = PPOTrainer(config, run_config=RunConfig(name=name, failure_config=failures))
    assert trainer.fit().return_value == {"status": "finished", "step": NUM_STEPS}
    beside.join(timeout=30)
    assert not failed, failed
    return numbers(read_metrics(folder))


ENVIRONMENT = """
import os, signal
from contextlib import suppress
from pathlib import Path

class Digits:
    '''Stops the engine between two turns, once, where a file says which.'''

    def __init__(self, stop):
        self.stop, self.left = Path(stop), 3

    def reset(self, prompt, label):
        return None

    def step(self, action):
        self.left -= 1
        if self.left == 1:
            with suppress(FileNotFoundError):
                pid = int(self.stop.read_text())
                self.stop.unlink()
                os.kill(pid, signal.SIGSTOP)
        return " more? ", sum(map(str.isdigit, action)), self.left == 0
"""


@pytest.fixture(scope="module")
def undisturbed(config: PPOConfig, local_ray: None) -> list[Any]:
    return run(config, "undisturbed")


def kill_in_a_call(pid: int, folder: Path) -> None:
    """It stands still from a step's end on: the next call to it waits until it is killed."""
    os.kill(pid, signal.SIGSTOP)
    before = len(read_metrics(folder))
    time.sleep(STANDS_STILL_S)
    assert len(read_metrics(folder)) <= before + 1 < NUM_STEPS
    os.kill(pid, signal.SIGKILL)


def episodic(config: PPOConfig, folder: Path, **rollout: Any) -> tuple[PPOConfig, Path]:
    """A run with episodes, and the file that has its environment stop an engine."""
    environment = folder / "digits.py"
    environment.write_text(ENVIRONMENT)
    told = config.model_dump(mode="json")
    told["model"]["reward"], told["reward"]["function"] = None, None
    told["rollout"] |= {
        "environment": f"{environment}:Digits",
        "environment_args": {"stop": str(folder / "stop")},
        "max_episode_tokens": 60,
        **rollout,
    }
    if "mode" in rollout:
        told["placement"]["mode"] = "dedicated"
    return PPOConfig.model_validate(told), folder / "stop"


def kill_store() -> None:
    (store,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if "WeightStoreActor" in " ".join(process.cmdline())
    )
    store.kill()


def test_engine_reference_reward_model_and_store(config: PPOConfig, undisturbed: list[Any]):
    """One after the other, each in the middle of a call; the engine also together with the store
    that has its weights, so that the learner has to push them once more."""

    def disturb(folder: Path) -> None:
        for steps, role in enumerate(("reference", "reward_0", "engine", "engine"), start=1):
            wait_for_steps(folder, steps)
            pid = pid_of(f"raypo:served:{role}:0")
            if steps == 4:
                kill_store()
            kill_in_a_call(pid, folder)

    assert run(config, "served", disturb) == undisturbed


def test_an_engine_that_is_killed_between_pause_and_resume(config: PPOConfig, tmp_path: Path):
    """What it was sampling is sampled by its next life, which nobody paused."""
    told = config.model_dump(mode="json")
    told["model"]["reward"] = None
    told["placement"]["mode"] = "dedicated"
    told["rollout"] |= {"mode": "async", "max_staleness": 2, "max_new_tokens": 100}

    def disturb(folder: Path) -> None:
        wait_for_steps(folder, 2)
        pid, actor = (
            pid_of("raypo:paused:engine:0"),
            ray.get_actor("raypo:paused:engine:0", "raypo"),
        )
        ray.get(actor.call.remote(Call("pause", ("recompute",))))
        os.kill(pid, signal.SIGKILL)

    figures = run(PPOConfig.model_validate(told), "paused", disturb)
    for row in figures:
        assert row["rollout/samples_sampled"] == row["rollout/samples_trained"] == 32
        assert row["rollout/staleness_max"] <= 2
    assert figures[-1]["rollout/samples_carried"] == 0
    files = sorted((Path(config.storage_path) / "paused" / "rollouts").glob("step_*.parquet"))
    trained = [group for file in files for group in pq.read_table(file)["group_index"].to_pylist()]
    assert trained == [group for group in range(8 * NUM_STEPS) for _ in range(4)]


def kill_when_asked_for_a_third_turn(run_name: str, stop: Path) -> None:
    pid = pid_of(f"raypo:{run_name}:engine:0")
    stop.with_name("pid").write_text(str(pid))
    stop.with_name("pid").rename(stop)
    while stop.exists():
        time.sleep(0.1)
    time.sleep(1.0)  # it is asked for, and stands still
    os.kill(pid, signal.SIGKILL)


def test_no_episode_is_lost_with_the_engine_or_the_worker(config: PPOConfig, tmp_path: Path):
    """The engine dies while it is asked for the third turn of 32 episodes, the worker later."""
    episodes, stop = episodic(config, tmp_path)

    def disturb(folder: Path) -> None:
        wait_for_steps(folder, 1)
        kill_when_asked_for_a_third_turn("episodes", stop)
        wait_for_steps(folder, 3)
        kill_train_workers()

    calm = run(episodes, "calm")
    assert all(row["rollout/episodes_failed"] == 0 for row in calm)
    assert run(episodes, "episodes", disturb) == calm


@pytest.mark.parametrize(
    ("name", "rollout"),
    [
        ("continuous", {"turns": "continuous"}),
        ("in_flight", {"mode": "async", "max_staleness": 2}),
    ],
)
def test_no_episode_is_lost_where_each_goes_on_by_itself(
    config: PPOConfig, tmp_path: Path, name: str, rollout: dict[str, Any]
):
    """The engine dies with turns of any number under way, also of batches that are ahead."""
    episodes, stop = episodic(config, tmp_path, **rollout)

    def disturb(folder: Path) -> None:
        wait_for_steps(folder, 2)
        kill_when_asked_for_a_third_turn(name, stop)

    figures = run(episodes, name, disturb)
    for row in figures:
        assert row["rollout/samples_sampled"] == row["rollout/samples_trained"] == 32
        assert (row["rollout/episodes_failed"], row["rollout/turns_mean"]) == (0, 3)
    files = sorted((Path(config.storage_path) / name / "rollouts").glob("step_*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert [row["group_index"] for row in rows] == [
        group for group in range(8 * NUM_STEPS) for _ in range(4)
    ]
    for row in rows:
        told = np.array(row["weight_versions"])[np.array(row["turn_index"]) >= 0]
        assert (np.diff(told) >= 0).all()
