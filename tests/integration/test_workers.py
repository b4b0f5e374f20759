"""A step under DeepSpeed does not depend on the number of workers, whatever the ZeRO stage.

Each worker has the DeepSpeed config that it would have on a GPU.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.recipe_learners import Case
from tests.integration.task import REPOSITORY
from tests.integration.test_offload import OPTIMIZERS, SMALL
from tests.tiny import tiny_policy

CASES = [("float32", 0), ("float32", 2), ("bfloat16", 3)]
"""Of two workers; the others, and three workers: tests/slow/test_more_workers.py."""
DIAGONAL = [
    Case("sft", "bfloat16", 0),
    Case("dpo", "float32", 1, "optimizer"),
    Case("kto", "bfloat16", 2),
    Case("reward_model", "float32", 3),
    Case("distillation", "bfloat16", 3, "both"),
    Case("apart", "float32", 2),
]
"""The whole matrix: tests/slow/test_every_learner.py."""
RESUMED = {
    1: [("float32", 2, 0), ("float32", 0, 3), ("bfloat16", 3, 1)],
    2: [("float32", 0, 2), ("float32", 2, 3), ("bfloat16", 3, 1)],
}
"""Number of workers -> dtype, and ZeRO stage before and after. The checkpoint is of the other
number of workers."""
LR = 1e-3
NORMS = {"ppo/policy_grad_norm", "ppo/critic_grad_norm", "train/grad_norm"}


def run_workers(
    folder: Path, count: int, cases: list[tuple[str, int]], **more: Any
) -> dict[Any, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = folder / f"task_{count}.json"
    out = folder / f"result_{count}.pt"
    asked = {"model": str(folder / "policy"), "cases": cases, "out": str(out)}
    asked |= {"matrix": [], "critic_workers": 0, "checkpoints": None, "resume": []}
    asked |= {"learner": {}, "images": "", **more}
    task.write_text(json.dumps(asked))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    # Files, not pipes: a worker whose pipe is full would wait for a reader, and the other for it.
    logs = [folder / f"worker_{rank}_of_{count}.log" for rank in range(count)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as stderr:
            command = [sys.executable, "-m", "tests.integration.workers_probe", str(task)]
            env = {**os.environ, **address, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, cwd=REPOSITORY, env=env, stderr=stderr))
    codes = [process.wait(timeout=3600) for process in processes]
    assert codes == [0] * count, "\n".join(log.read_text() for log in logs)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("workers")
    tiny_policy(folder / "policy")
    (folder / "checkpoints").mkdir()
    matrices = {1: together(DIAGONAL), 2: DIAGONAL}
    with ThreadPoolExecutor(2) as threads:  # importing DeepSpeed keeps one core a process busy
        found = threads.map(
            lambda count: run_workers(
                folder,
                count,
                CASES,
                matrix=matrices[count],
                checkpoints=str(folder / "checkpoints"),
                resume=[
                    (f"{dtype}_{before}_{3 - count}", dtype, after)
                    for dtype, before, after in RESUMED[count]
                ],
            ),
            matrices,
        )
        return dict(zip(matrices, found, strict=True))


def together(cases: Iterable[Case]) -> list[Case]:
    """Return the same cases for one worker, which has the critic too."""
    return [each._replace(kind="ppo") if each.kind == "apart" else each for each in cases]


def assert_agrees_with_one_worker(
    one: dict[str, Any], many: dict[str, Any], dtype: str, stage: int, *, apart: bool = False
) -> None:
    """Metrics and weights of a step; `apart`: policy and critic have one worker each."""
    exact = dtype == "float32"
    missing = one["figures"].keys() - many["figures"].keys()
    # DeepSpeed does not tell the norms of several workers at its own stage 0.
    assert missing == (
        NORMS & one["figures"].keys() if exact and stage == 0 and not apart else set()
    )
    for name in many["figures"]:
        value = one["figures"][name]
        rel, absolute = (1e-4, 1e-5) if exact else (0.1, 0.02)
        close = pytest.approx(value, rel=rel, abs=absolute, nan_ok=True)
        assert many["figures"][name] == close, name
    # Adam's first steps are lr * sign(gradient): where the gradient is rounding, it may flip.
    difference = torch.cat(
        [(many["weights"][name] - w).abs().flatten() for name, w in one["weights"].items()]
    )
    assert difference.max() <= (0.1 * LR if exact else 10 * LR)
    assert difference.mean() <= (1e-3 * LR if exact else 0.5 * LR)


@pytest.mark.parametrize("case", CASES)
def test_metrics_and_weights_agree_with_one_worker(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    assert_agrees_with_one_worker(outcomes[1][case], outcomes[2][case], *case)


@pytest.mark.parametrize(
    ("workers", "resumed"), [(count, each) for count in RESUMED for each in RESUMED[count]]
)
def test_the_state_of_other_workers_at_another_stage_goes_on_to_rounding(
    outcomes: dict[int, dict[Any, Any]], workers: int, resumed: tuple[str, int, int]
):
    """It is compared with the second step of one worker from its own checkpoint."""
    dtype, before, after = resumed
    whole = outcomes[1][dtype, before]["second"]
    found = outcomes[workers][f"{dtype}_{before}_{3 - workers}"]
    assert_agrees_with_one_worker(whole, found, dtype, after, apart=workers == 1)


@pytest.mark.parametrize("case", DIAGONAL, ids=str)
def test_learners_of_every_recipe_agree_with_one_worker(
    outcomes: dict[int, dict[Any, Any]], case: Case
):
    """One of two equal learners was moved to the host and back before each of two steps."""
    one = outcomes[1][together([case])[0]]
    assert_agrees_with_one_worker(
        one, outcomes[2][case], case.dtype, case.stage, apart=case.kind == "apart"
    )


@pytest.mark.parametrize("case", CASES)
def test_workers_leave_the_device_whichever_class_of_deepspeeds_holds_their_weights(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    """They were moved and brought back before the step, too: the figures above are of that."""
    found = outcomes[2][case]
    assert found["optimizer"] == OPTIMIZERS[case]
    assert found["moved"] > found["held"] - SMALL


@pytest.mark.parametrize("case", CASES)
def test_workers_with_gpus_communicate_meanwhile_at_the_stages_that_can(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    assert outcomes[2][case]["overlaps"] is (case[1] >= 2)
    # Alone, stage 3 would otherwise wait for all computation at every fetch of weights.
    assert outcomes[1][case]["overlaps"] is (case[1] == 3)


def test_zero_stages_agree_on_two_workers(outcomes: dict[int, dict[Any, Any]]):
    plain, sharded = (outcomes[2]["float32", each]["weights"] for each in (0, 2))
    assert max(float((sharded[name] - w).abs().max()) for name, w in plain.items()) < 0.1 * LR


def test_workers_are_fed_about_the_same_number_of_tokens(
    outcomes: dict[int, dict[Any, Any]],
):
    assert_fed_alike(outcomes[2]["float32", 0]["tokens"])


def assert_fed_alike(tokens: list[int]) -> None:
    assert max(tokens) <= 1.2 * min(tokens)
