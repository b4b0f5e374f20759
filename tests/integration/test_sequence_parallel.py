"""Workers that share the tokens of their rows agree with one worker; over real gloo.

Four workers: tests/slow/test_sequence_parallel.py.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.recipe_learners import Case
from tests.integration.sequence_probe import HEADS, outcomes
from tests.integration.test_workers import (
    assert_agrees_with_one_worker,
    run_workers,
    start_workers,
    together,
)
from tests.tiny import tiny_policy

PASSES = [
    *(f"{model}, {rows}" for model in HEADS for rows in ("short", "long", "tiny")),
    *(f"{model}, {rows}" for model in ("window", "capped") for rows in ("short", "long")),
    "checkpointed",
]
CASES = [("float32", 0), ("float32", 3)]
MATRIX = [
    Case("sft", "float32", 1),
    Case("dpo", "float32", 2),
    Case("kto", "float32", 0),
    Case("reward_model", "float32", 3),
    Case("distillation", "bfloat16", 3),
]


def passes_of(folder: Path, workers: int) -> dict[str, dict[str, Tensor]]:
    out = folder / f"passes_{workers}.pt"
    start_workers(folder, workers, "tests.integration.sequence_probe", str(out))
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return outcomes(None)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return passes_of(tmp_path_factory.mktemp("passes"), 2)


def assert_equal_passes(shared: Mapping[str, Tensor], alone: Mapping[str, Tensor]) -> None:
    assert shared.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("which", PASSES)
def test_log_probs_entropies_and_gradients_are_those_of_one_worker(
    which: str, shared: dict[str, dict[str, Tensor]], alone: dict[str, dict[str, Tensor]]
):
    """For any number of heads, sliding windows and caps, and lengths that nothing divides."""
    assert_equal_passes(shared[which], alone[which])


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    """The outcomes of one worker, and of two that share their rows and resume its checkpoint."""
    folder = tmp_path_factory.mktemp("learners")
    tiny_policy(folder / "policy", kv_heads=1)
    (folder / "checkpoints").mkdir()
    keys = {"checkpoints": str(folder / "checkpoints")}
    one = run_workers(folder, 1, CASES, matrix=together(MATRIX), **keys)
    two = run_workers(
        folder,
        2,
        CASES,
        matrix=MATRIX,
        learner={
            "num_workers": 2,
            "sequence_parallel": 2,
            "activation_checkpointing": True,
            "mlp_tile_tokens": 8,
        },
        resume=[("float32_3_1", "float32", 2)],
        **keys,
    )
    return {1: one, 2: two}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_ppo_agrees_with_one_worker(
    case: tuple[str, int], learners: dict[int, dict[Any, Any]]
):
    one, two = learners[1][case], learners[2][case]
    assert two["tokens"] == one["tokens"] * 2  # both have all rows
    assert_agrees_with_one_worker(one, two, *case)
    assert_agrees_with_one_worker(one["second"], two["second"], *case)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_a_step_of_every_recipe_agrees_with_one_worker(
    case: Case, learners: dict[int, dict[Any, Any]]
):
    assert_agrees_with_one_worker(learners[1][case], learners[2][case], case.dtype, case.stage)


def test_workers_may_have_different_numbers_of_tiles(tmp_path: Path):
    """With ZeRO-3, where an MLP's weights are gathered by all workers together."""
    tiny_policy(tmp_path / "policy")
    case = "float32", 3
    one = run_workers(tmp_path, 1, [case])[case]
    tiled = {"num_workers": 2, "mlp_tile_tokens": 1}  # as many tiles as a worker has tokens
    two = run_workers(tmp_path, 2, [case], learner=tiled)[case]
    assert_agrees_with_one_worker(one, two, *case)


def test_a_checkpoint_of_one_worker_goes_on_to_rounding(learners: dict[int, dict[Any, Any]]):
    whole = learners[1]["float32", 3]["second"]
    assert_agrees_with_one_worker(whole, learners[2]["float32_3_1"], "float32", 2)
