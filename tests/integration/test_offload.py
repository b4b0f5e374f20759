"""A learner that was moved to the host and back goes on as if it had stayed."""

import pytest

from tests.integration.learning import (
    experience,
    largest_difference,
    learner,
    weights,
    with_targets,
)
from tests.integration.test_learner import model  # noqa: F401

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_off_and_back_changes_nothing(model: str, stage: int):  # noqa: F811
    stayed, moved = (learner(model, stage=stage) for _ in range(2))
    batch = with_targets(stayed.evaluate(experience()))
    for each in (stayed, moved):
        each.update(batch, step=1)

    moved.offload_training_state()
    assert largest_difference(weights(moved), weights(stayed)) == 0.0, "a push reads them now"
    moved.offload_parameters()
    moved.offload_parameters()
    moved.reload()

    assert largest_difference(weights(moved), weights(stayed)) == 0.0
    assert moved.update(batch, step=2) == stayed.update(batch, step=2)
    assert largest_difference(weights(moved), weights(stayed)) == 0.0
