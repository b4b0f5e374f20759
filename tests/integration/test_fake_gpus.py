"""Which GPU each process of a run is shown, on eight GPUs that Ray only believes in."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.task import REPOSITORY

EXPECTED = {
    "colocated": [{"worker 0", "engine:0", "reference:0", "reward_0:0"}],
    # The engine spans the GPUs of the policy's two workers. Frozen models are beside every worker.
    "tensor_parallel_and_a_critic_apart": [
        {"worker 0", "engine:0", "reference:0", "reward_0:0"},
        {"worker 1", "engine:0", "reference:1", "reward_0:1"},
        {"worker 2", "reference:2", "reward_0:2"},
    ],
    "two_engines_on_one_gpu": [
        {"engine:0", "engine:1"},
        {"reference:0", "reward_0:0"},
        {"worker 0"},
    ],
    "a_dedicated_engine_over_two_gpus": [
        {"engine:0"},
        {"engine:0"},
        {"worker 0", "reference:0", "reward_0:0"},
    ],
}
"""By run, the processes on each of its GPUs, written down by hand."""
HERE = ("tensor_parallel_and_a_critic_apart", "two_engines_on_one_gpu")
"""The other runs: tests/slow/test_fake_gpus.py."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_all(tmp_path_factory.mktemp("t"), HERE)


def run_all(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.on_fake_gpus", str(folder), *names],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("run", HERE)
def test_each_process_is_shown_the_gpus_that_the_plan_gives_it(found: dict[str, Any], run: str):
    assert_shown_as_planned(found, run)


def assert_shown_as_planned(found: dict[str, Any], run: str) -> None:
    seen: dict[str, list[str]] = found[run]["seen"]
    gpus = sorted({gpu for shown in seen.values() for gpu in shown})
    on_each = [{name for name, shown in seen.items() if gpu in shown} for gpu in gpus]
    assert sorted_sets(on_each) == sorted_sets(EXPECTED[run])
    planned = [
        {name.replace("learner ", "").replace("critic ", "") for name in each}
        for each in found[run]["planned"]
    ]
    assert sorted_sets(planned) == sorted_sets(EXPECTED[run])
    assert [seen[f"worker {rank}"] for rank in range(len(found[run]["granted"]))] == found[run][
        "granted"
    ], "a worker computes on the GPU that Ray has granted it"


def test_an_engine_sees_its_gpus_in_the_order_of_its_workers(found: dict[str, Any]):
    seen = found["tensor_parallel_and_a_critic_apart"]["seen"]
    assert seen["engine:0"] == seen["worker 0"] + seen["worker 1"]


def sorted_sets(sets: Collection[Collection[str]]) -> list[list[str]]:
    return sorted(map(sorted, sets))
