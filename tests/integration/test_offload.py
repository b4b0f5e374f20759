"""A learner that was moved to the host and back goes on as if it had stayed."""

import pytest

from raypo.models import host_memory
from tests.integration.learning import (
    STAGES,
    experience,
    largest_difference,
    learner,
    weights,
    with_targets,
)
from tests.integration.test_learner import model  # noqa: F401

pytestmark = pytest.mark.usefixtures("group")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_off_and_back_changes_nothing(
    model: str,  # noqa: F811
    stage: int,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_memory, "HOST", "elsewhere")  # or nothing on a CPU would be moved
    stayed, moved = (learner(model, stage=stage, dtype=dtype) for _ in range(2))
    batch = with_targets(stayed.with_log_probs_and_values(experience()))
    for step in (1, 2):  # before the first update there are no optimizer states
        moved.offload_training_state()
        assert largest_difference(weights(moved), weights(stayed)) == 0.0, "a push reads them now"
        moved.offload_parameters()
        moved.offload_parameters()
        moved.reload()

        assert largest_difference(weights(moved), weights(stayed)) == 0.0
        assert moved.update(batch, step=step)[1] == stayed.update(batch, step=step)[1]
        assert largest_difference(weights(moved), weights(stayed)) == 0.0
