"""Muon under real DeepSpeed against Newton-Schulz in float64, and a step that is resumed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raypo.learner.deepspeed_config import Sharding
from raypo.learner.learner import Learner, minibatch_order
from raypo.models.loading import load_causal_lm
from raypo.models.model_shape import ITEMSIZE, ModelShape
from raypo.models.networks import Policy
from raypo.plan.memory import trained as plan_of
from raypo.types import Experience
from tests.integration.learning import (
    LR,
    STAGES,
    experience,
    largest_difference,
    learner,
    plain_ppo_loss,
    save_state,
    weights,
    with_targets,
)

pytestmark = pytest.mark.usefixtures("group")

DECAY = 0.1
MUON = {"optimizer": "muon", "weight_decay": DECAY}


def orthogonal(matrix: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps of Jordan et al. 2024, in float64, without its shortcuts."""
    x = matrix.double()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def is_matrix(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and name != "lm_head"


def plain_pytorch(model: str, batch: Experience, order: list[int]) -> dict[str, Tensor]:
    """Muon of Liu et al. 2025, eq. 4: W - lr (0.2 sqrt(max(m, n)) O + decay W), by hand."""
    policy = Policy(load_causal_lm(model, dtype="float32"), temperature=1.0)
    matrices = [m.weight for n, m in policy.model.named_modules() if is_matrix(n, m)]
    known = {id(matrix) for matrix in matrices}
    others = [p for p in policy.parameters() if id(p) not in known]
    adamw = torch.optim.AdamW(others, lr=LR, weight_decay=DECAY)
    momenta = [torch.zeros_like(matrix, dtype=torch.float64) for matrix in matrices]
    for minibatch in order:
        piece = batch.select(torch.nonzero(batch.minibatch == minibatch).flatten())
        log_probs, _ = policy(piece)
        loss = plain_ppo_loss(log_probs, piece)
        policy.zero_grad()
        loss.backward()
        adamw.step()
        for matrix, momentum in zip(matrices, momenta, strict=True):
            assert matrix.grad is not None
            momentum.mul_(0.95).add_(matrix.grad.double(), alpha=0.05)
            nesterov = 0.05 * matrix.grad.double() + 0.95 * momentum
            update = 0.2 * max(matrix.shape) ** 0.5 * orthogonal(nesterov) + DECAY * matrix.double()
            matrix.data -= (LR * update).float()
    return {n: p.detach() for n, p in policy.model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_two_epochs_are_those_of_newton_schulz_in_float64(model: str, stage: int):
    trained = learner(model, stage=stage, optimizer=MUON)
    before = weights(trained)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    _, update = trained.update(batch, step=1)
    order = minibatch_order(0, 1, 0, 2) + minibatch_order(0, 1, 1, 2)
    expected = plain_pytorch(model, batch, order)
    after = weights(trained)
    assert largest_difference(after, expected) < 0.1 * LR  # of AdamW, whose signs may flip
    layers = {name for name in expected if name.endswith("proj.weight")}
    assert len(layers) == 14  # two layers
    for name in layers:
        torch.testing.assert_close(after[name], expected[name], rtol=0, atol=2e-3 * LR)
        assert 0.1 * LR < (after[name] - before[name]).pow(2).mean().sqrt() < LR
    assert update.metrics["ppo/skipped_updates"] == 0.0
    assert "ppo/policy_grad_norm" not in update.metrics


def assert_plan_counts_the_moments(trained: Learner, model: str, stage: int, dtype: str) -> None:
    """Compare the optimizer's state with the moments that `raypo plan` counts, up to padding."""
    shape = ModelShape.read(model)
    counted, _, _ = plan_of(
        shape.parameters,
        shape.largest_tensor,
        Sharding(max(stage, 1) if dtype == "bfloat16" else stage),
        itemsize=ITEMSIZE[dtype],
        matrices=shape.layers * shape.layer_weights,
    )
    moments = counted["optimizer"] - (4 * shape.parameters if stage or dtype == "bfloat16" else 0)
    policy = trained._policy
    states = [state for state in policy._optimizer.state.values() for state in state.values()]
    held = sum(each.nbytes for each in states if torch.is_tensor(each) and each.numel() > 1)
    assert held == pytest.approx(moments, rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_restored_it_goes_on_bit_for_bit(
    model: str, stage: int, dtype: str, tmp_path: Path
):
    trained = learner(model, stage=stage, optimizer=MUON, dtype=dtype)
    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    assert_plan_counts_the_moments(trained, model, stage, dtype)
    save_state(trained, tmp_path)
    _, expected = trained.update(batch, step=2)

    resumed = learner(model, stage=stage, optimizer=MUON, dtype=dtype)
    resumed.restore(tmp_path)
    assert resumed.update(batch, step=2)[1] == expected
    assert largest_difference(weights(resumed), weights(trained)) == 0.0
    with pytest.raises(ValueError, match=r"learner\.optimizer"):
        learner(model, stage=stage, dtype=dtype).restore(tmp_path)
