"""A learner that was moved to the host and back goes on as if it had stayed."""

from typing import Any

import pytest

from tests.integration.learning import (
    LR,
    experience,
    held_bytes,
    largest_difference,
    learner,
    weights,
    with_targets,
)
from tests.integration.off_load import off_and_back

pytestmark = pytest.mark.usefixtures("group", "as_on_a_gpu")

ZERO, BF16, STAGE3 = "DeepSpeedZeroOptimizer", "BF16_Optimizer", "DeepSpeedZeroOptimizer_Stage3"
OPTIMIZERS = {
    ("float32", 0): "AdamW",
    ("float32", 1): ZERO,
    ("float32", 2): ZERO,
    ("float32", 3): STAGE3,
    ("bfloat16", 0): BF16,
    ("bfloat16", 1): BF16,
    ("bfloat16", 2): ZERO,
    ("bfloat16", 3): STAGE3,
}
"""Which of DeepSpeed's classes keeps what is to be moved, as several workers have it."""
LORA = {"rank": 2}
SMALL = 4096
"""Bytes of counters, masks and heads; the weights of policy and critic have 350 kB in bfloat16."""


def run(
    model: str,
    optimizer: str,
    **keys: Any,
) -> None:
    before = held_bytes()
    moved = learner(model, **keys)
    held = held_bytes() - before
    stayed = learner(model, **keys)
    assert type(moved._policy._engine.optimizer).__name__ == optimizer
    batch = with_targets(stayed.with_log_probs_and_values(experience()))
    for step in (1, 2):  # before the first update there are no optimizer states
        off_and_back(moved)
        expected = weights(stayed)
        with_both = held_bytes()
        moved.offload_training_state()
        assert largest_difference(weights(moved), expected) == 0.0, "a push reads them now"
        moved.offload_parameters()
        moved.offload_parameters()
        assert with_both - held_bytes() > held - SMALL
        moved.reload()

        assert largest_difference(weights(moved), expected) == 0.0
        before = held_bytes()
        figures = moved.update(batch, step=step)[1]
        held += held_bytes() - before  # the moments
        assert figures == stayed.update(batch, step=step)[1]
        assert largest_difference(weights(moved), weights(stayed)) == 0.0


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [("float32", 0), ("float32", 2), ("float32", 3), ("bfloat16", 1), ("bfloat16", 3)],
)
def test_off_and_back_changes_nothing(
    model: str,
    dtype: str,
    stage: int,
):
    """The stage is told to DeepSpeed itself: raypo gives a worker alone another one."""
    told = {"zero_optimization": {"stage": stage}}
    optimizer = OPTIMIZERS[dtype, stage]
    run(model, optimizer, stage=stage, dtype=dtype, deepspeed=told)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_weights_below_an_adapter_leave_too(
    model: str,
    stage: int,
):
    told = {"zero_optimization": {"stage": stage}}
    optimizer = OPTIMIZERS["bfloat16", stage]
    run(model, optimizer, stage=stage, dtype="bfloat16", deepspeed=told, lora=LORA)


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 2), ("bfloat16", 3)])
def test_an_optimizer_that_the_config_off_loads_learns_the_same(
    model: str,
    dtype: str,
    stage: int,
):
    zero: dict[str, Any] = {"stage": stage}
    learners = [
        learner(model, stage=stage, dtype=dtype, deepspeed={"zero_optimization": keys})
        for keys in (zero, zero | {"offload_optimizer": {"device": "cpu"}})
    ]
    batch = with_targets(learners[0].with_log_probs_and_values(experience()))
    before = weights(learners[0])
    for each in learners:
        each.update(batch, step=1)
    plain, told = map(weights, learners)
    assert largest_difference(plain, before) > 0.1 * LR
    assert largest_difference(plain, told) <= (0.01 * LR if dtype == "float32" else LR)
