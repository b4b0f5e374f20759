"""Asynchronous runs in their combinations, on real engines: every sample has one fate, every token
keeps the bound, whatever is slow, fails or is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer, Rollout
from raypo.cluster.connect import connect
from raypo.config import ClusterSection, ConfigError
from raypo.deployment.spec import Call
from raypo.serving.requests import Load
from raypo.storage.checkpoints import find_checkpoint
from raypo.storage.summary import FATES
from tests.integration.task import (
    REPOSITORY,
    kill_train_workers,
    numbers,
    pid_of,
    read_metrics,
    wait_for_steps,
)

pytestmark = pytest.mark.usefixtures("ray_of_six")

NUM_STEPS, STALENESS = 6, 2
SAMPLES = 32
"""Of a step."""
ADAPTER: dict[str, Any] = {
    "model.lora": {"rank": 4, "alpha": 16, "push": "adapter"},
    "learner.policy_lr": 1e-2,
}
TWO_OF_EACH: dict[str, Any] = {"learner.num_workers": 2, "rollout.engine.count": 2}


@pytest.fixture(scope="module")
def ray_of_six() -> Iterator[None]:
    """As `local_ray`, with CPUs for several workers beside several engines."""
    before = ray.is_initialized()
    ray.shutdown()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_OVERRIDE_RESOURCES", json.dumps({"CPU": 6}))
        environment.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        connect(ClusterSection())
        assert ray.cluster_resources()["CPU"] == 6
        yield
        ray.shutdown()
    if before:
        connect(ClusterSection())


def run(
    task: Path,
    name: str,
    disturb: Callable[[Path], None] | None = None,
    reward: Callable[[list[Rollout]], list[float | None]] | None = None,
    **changes: Any,
) -> tuple[Path, list[dict[str, Any]]]:
    """Its folder and its metrics; what disturbs it has to come to its end before the run does."""
    keys = {
        "num_steps": NUM_STEPS,
        "placement.mode": {"engine": "dedicated"},
        "rollout.mode": "async",
        "rollout.max_staleness": STALENESS,
        "rollout.max_new_tokens": 100,
        "rollout.engine.extra": {"max_num_seqs": 4},  # so that requests meet pushes, and wait
        "eval.prompts": None,
    }
    config = PPOConfig.load(task, {**keys, **changes})
    folder, ended = task.parent / "runs" / name, []

    def disturbs() -> None:
        assert disturb is not None
        disturb(folder)
        ended.append(len(read_metrics(folder)))

    beside = threading.Thread(target=disturbs, daemon=True)
    if disturb is not None:
        beside.start()
    settings = RunConfig(name=name, failure_config=FailureConfig(max_failures=2))
    result = PPOTrainer(config, reward_funcs=reward, run_config=settings).fit()
    assert result.return_value == {"status": "finished", "step": NUM_STEPS}
    if disturb is not None:
        beside.join(timeout=10)
        assert ended, "the run came to its end before it was disturbed"
        assert ended[0] < NUM_STEPS
    return folder, read_metrics(folder)


def groups(folder: Path) -> list[list[int]]:
    """Of each step, the draws that it trains, each once, in the order of the file."""
    steps = []
    for step in range(1, NUM_STEPS + 1):
        table = pq.read_table(folder / "rollouts" / f"step_{step:05d}.parquet")
        samples = list(
            zip(table["group_index"].to_pylist(), table["sample_index"].to_pylist(), strict=True)
        )
        assert len(samples) == len(set(samples))
        steps.append(sorted({group for group, _ in samples}))
        for versions in table["weight_versions"].to_pylist():
            lags = step - 1 - np.array(versions)
            assert lags.min() >= 0
            assert lags.max() <= STALENESS
    flat = [group for step in steps for group in step]
    assert len(flat) == len(set(flat)), "a prompt was trained twice"
    return steps


def assert_accounts_close(folder: Path, metrics: list[dict[str, Any]]) -> dict[str, int]:
    carried = 0.0
    for row in metrics:
        now = {name: row.get(f"rollout/samples_{name}", 0.0) for name in ("asked", "carried")}
        done = sum(row.get(f"rollout/samples_{fate}", 0.0) for fate in FATES)
        assert done == row["rollout/samples_sampled"]
        assert carried + now["asked"] == done + now["carried"]
        carried = now["carried"]
    totals: dict[str, int] = json.loads((folder / "summary.json").read_text())["samples"]
    assert totals["sampled"] == sum(totals[name] for name in (*FATES, "carried"))
    return totals


def all_draws(steps: list[list[int]]) -> list[int]:
    return [group for step in steps for group in step]


def load_of(replica: str) -> Load:
    actor: Any = ray.get_actor(replica, "raypo")
    load, _ = ray.get(actor.call.remote(Call("load_summary")))
    assert isinstance(load, Load)
    return load


def test_two_workers_with_two_engines_that_are_both_lost_after_a_push(task: Path):
    """What was in flight is asked for anew, under what was pushed last."""

    def kill_both(folder: Path) -> None:
        wait_for_steps(folder, 2)
        for number in range(2):
            os.kill(pid_of(f"raypo:two:engine:{number}"), signal.SIGKILL)

    folder, metrics = run(task, "two", kill_both, **TWO_OF_EACH)
    steps = groups(folder)
    assert steps == [list(range(8 * step, 8 * step + 8)) for step in range(NUM_STEPS)]
    totals = assert_accounts_close(folder, metrics)
    assert totals["trained"] == NUM_STEPS * 32
    assert totals["carried"] == 0


@pytest.mark.parametrize("in_flight", ["recompute", "keep", "restart"])
def test_requests_under_way_meet_weights_that_are_broadcast(task: Path, in_flight: str):
    """To two engines, of which one is lost and joins the next group."""
    from tests.slow import by_broadcast

    def kill_one(folder: Path) -> None:
        wait_for_steps(folder, 2)
        os.kill(pid_of(f"raypo:broadcast_{in_flight}:engine:1"), signal.SIGKILL)

    two: dict[str, Any] = {"rollout.engine.count": 2, "rollout.in_flight": in_flight}
    folder, metrics = run(
        task, f"broadcast_{in_flight}", kill_one, reward=by_broadcast.score, **two
    )
    assert all_draws(groups(folder)) == list(range(8 * NUM_STEPS))
    assert assert_accounts_close(folder, metrics)["trained"] == NUM_STEPS * SAMPLES
    assert max(row["rollout/staleness_max"] for row in metrics) > 0
    assert all(row["mismatch/probe_gap_max"] < 1e-3 for row in metrics)


def test_an_adapter_that_is_pushed_beside_its_base(task: Path):
    folder, metrics = run(task, "adapter", **ADAPTER)
    assert all_draws(groups(folder)) == list(range(8 * NUM_STEPS))
    assert_accounts_close(folder, metrics)
    assert all(row["mismatch/probe_gap_max"] < 1e-3 for row in metrics)
    assert max(row["rollout/staleness_max"] for row in metrics) > 0


def alike_in_every_third_group(rollouts: list[Rollout]) -> list[float | None]:
    return [
        1.0 if rollout.group_index % 3 == 0 else float(rollout.sample_index) for rollout in rollouts
    ]


def test_a_filter_whose_batches_overlap_trains_the_groups_that_pass_in_their_order(task: Path):
    filtered: dict[str, Any] = {"ppo.filter.enabled": True}
    folder, metrics = run(task, "filter", reward=alike_in_every_third_group, **filtered)
    drawn = all_draws(groups(folder))
    assert drawn == [group for group in range(2 * max(drawn)) if group % 3][: 8 * NUM_STEPS]
    totals = assert_accounts_close(folder, metrics)
    assert totals["filtered"] == 4 * sum(group % 3 == 0 for group in range(max(drawn)))
    assert totals["carried"] == 0


def test_a_killed_worker_loses_no_sample_of_those_that_are_in_flight_and_stale(task: Path):
    """The engine outlives it, with requests that were asked for before its last push."""
    stale_in_flight: list[float] = []

    def kill(folder: Path) -> None:
        """At the end of step k at most one batch was asked for since the push of version k."""
        wait_for_steps(folder, 3)
        while not stale_in_flight:
            load = load_of("raypo:killed:engine:0")
            if (stale := load.queued + load.running - SAMPLES) > SAMPLES // 2:
                stale_in_flight.append(stale)
        kill_train_workers()

    one_at_a_time: dict[str, Any] = {"rollout.engine.extra": {"max_num_seqs": 1}}
    folder, metrics = run(task, "killed", kill, **one_at_a_time)
    assert stale_in_flight
    assert all_draws(groups(folder)) == list(range(8 * NUM_STEPS))
    totals = assert_accounts_close(folder, metrics)
    assert totals["carried"] == 0
    assert totals["trained"] == SAMPLES * NUM_STEPS
    assert totals["asked_again"] > 0
    assert max(row["rollout/staleness_max"] for row in metrics[3:]) > 0, "none was stale"


def after_a_checkpoint(folder: Path) -> None:
    while True:
        with suppress(ConfigError):
            find_checkpoint(str(folder))
            return
        time.sleep(0.01)


def in_an_update(folder: Path) -> None:
    wait_for_steps(folder, 3)
    last = read_metrics(folder)[-1]
    assert last["time/update_s"] > 0.6 * last["time/step_s"], "the next one may not be half done"
    time.sleep(0.5 * last["time/step_s"])


@pytest.mark.parametrize("when", [after_a_checkpoint, in_an_update])
def test_two_workers_that_are_killed_lose_no_sample(task: Path, when: Callable[[Path], None]):
    def kill(folder: Path) -> None:
        when(folder)
        kill_train_workers()

    changes: dict[str, Any] = TWO_OF_EACH | {"ppo.num_epochs": 16}
    folder, metrics = run(task, f"killed_{when.__name__}", kill, **changes)
    assert all_draws(groups(folder)) == list(range(8 * NUM_STEPS))
    totals = assert_accounts_close(folder, metrics)
    assert (totals["carried"], totals["trained"]) == (0, SAMPLES * NUM_STEPS)


def stuck(rollouts: list[Rollout]) -> list[float]:
    if rollouts[0].weight_version:
        threading.Event().wait()
    return [float(len(each.response_ids)) for each in rollouts]


def test_a_scorer_that_hangs_ends_the_run_by_name(task: Path):
    """The learner waits for a batch whose scores never come."""
    with pytest.raises(Exception, match=r"reward\.timeout_s \(3\)"):
        run(task, "stuck", reward=stuck, **{"reward.timeout_s": 3.0})  # pyright: ignore[reportArgumentType]
    assert 1 <= len(read_metrics(task.parent / "runs" / "stuck")) < NUM_STEPS


class Digits:
    """Asks twice; a turn is worth its share of digits."""

    def reset(self, prompt: str, label: str) -> None:
        self.left = 2

    def step(self, action: str) -> tuple[str, float, bool]:
        self.left -= 1
        return " more? ", sum(map(str.isdigit, action)) / 8, self.left == 0


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("workers", {"learner.num_workers": 2, "rollout.engine.count": 1}),
        ("filter", {"ppo.filter.enabled": True}),
        ("adapter", ADAPTER),
        (
            "environment",
            {
                "rollout.environment": f"{__name__}:Digits",
                "rollout.max_new_tokens": 8,
                "rollout.max_episode_tokens": 60,
            },
        ),
    ],
)
def test_async_without_staleness_is_the_synchronous_run(
    task: Path, what: str, changes: dict[str, Any]
):
    """Bit for bit, beside a synchronous run of the same keys."""
    reward = None if what == "environment" else alike_in_every_third_group
    changes |= {"reward.function": None} if reward is None else {}

    def of(mode: str, max_staleness: Any) -> tuple[list[dict[str, Any]], list[pa.Table]]:
        ahead: dict[str, Any] = {"rollout.mode": mode, "rollout.max_staleness": max_staleness}
        folder, metrics = run(task, f"{what}_{mode}", reward=reward, **changes, **ahead)
        files = sorted((folder / "rollouts").glob("step_*.parquet"))
        return numbers(metrics), [pq.read_table(each).drop_columns("episode") for each in files]

    metrics, rows = of("async", 0)
    assert (metrics, rows) == of("sync", "auto")
    assert len(rows) == NUM_STEPS
    if what == "filter":
        assert all(row["rollout/samples_filtered"] > 0 for row in metrics)


def test_a_critic_on_workers_of_its_own(task: Path):
    apart: dict[str, Any] = {"learner.critic_workers": 1}
    folder, metrics = run(task, "apart", **apart)
    assert all_draws(groups(folder)) == list(range(8 * NUM_STEPS))
    assert_accounts_close(folder, metrics)
    assert all("ppo/value_loss" in row for row in metrics)
