import math

import pytest
import torch

from raypo.ppo.kl import KLController, kl_estimate, kl_loss_terms, kl_statistics
from tests.unit.ppo.steps import INF, NAN

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_st"])
@pytest.mark.parametrize(
    "pair", [(-1e4, -1.0), (-1.0, -1e4), (-INF, -1.0), (-1.0, -INF), (-INF,) * 2]
)
def test_extreme_log_ratios_stay_finite(kind, pair):
    log_probs = torch.tensor([[pair[0]]], requires_grad=True)

    terms = kl_loss_terms(log_probs, torch.tensor([[pair[1]]]), ONE, kind=kind)
    terms.sum().backward()

    assert terms.isfinite().all()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert kl_estimate(log_probs, torch.tensor([[pair[1]]]), kind="k1").isfinite().all()


@pytest.mark.parametrize("gap", [19.0, 20.0, 21.0, 40.0, 1000.0])
def test_k3_and_its_gradient_grow_on_where_the_policy_is_far_above_the_reference(gap):
    log_probs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)

    terms = kl_loss_terms(log_probs, log_probs.detach() - gap, ONE, kind="k3")
    terms.sum().backward()

    assert terms.item() == pytest.approx(gap - 1 + math.exp(-gap))
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(1 - math.exp(-gap))


def test_k3_stops_growing_where_the_reference_is_far_above_the_policy():
    log_probs = torch.tensor([[-22.0]], dtype=torch.float64, requires_grad=True)

    terms = kl_loss_terms(log_probs, torch.tensor([[-1.0]]).double(), ONE, kind="k3")
    terms.sum().backward()

    # l = -21 is clamped to -20: a value of exp(20) - 21, and no gradient
    assert terms.item() == pytest.approx(math.exp(20.0) - 21.0)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == 0.0


def test_statistics_by_hand():
    log_probs = torch.tensor([[-1.0, -1.0, -1.0], [0.0, -31.0, NAN]])
    reference = torch.tensor([[-1.5, -2.0, NAN], [-30.0, -1.0, NAN]])
    mask = torch.tensor([[True, True, False], [True, True, False]])

    stats = kl_statistics(log_probs, reference, mask)

    # 0.5 + 1 + 30 - 30 nats over 4 tokens; one log-ratio is below -20
    assert {k: v.item() for k, v in stats.items()} == {
        "kl": 1.5,
        "tokens": 4.0,
        "clamped": 1.0,
    }


def test_adaptive_coefficient_by_hand():
    controller = KLController(0.1, target=6.0, horizon=1000.0)

    # 9 / 6 - 1 = 0.5 is clipped to 0.2; 0.1 * (1 + 0.2 * 100 / 1000)
    assert controller.updated(9.0, 100).coef == pytest.approx(0.102)
    # 5.4 / 6 - 1 = -0.1; 0.1 * (1 - 0.1 * 100 / 1000)
    assert controller.updated(5.4, 100).coef == pytest.approx(0.099)
    assert controller.updated(6.0, 100).coef == 0.1
    assert controller.updated(NAN, 100) == controller
    assert controller.updated(INF, 100).coef == pytest.approx(0.102)


def test_a_step_too_large_for_the_horizon_is_refused_before_the_coefficient_turns_negative():
    with pytest.raises(ValueError, match="horizon"):
        KLController(0.1, target=6.0, horizon=100.0).updated(0.0, 500)
