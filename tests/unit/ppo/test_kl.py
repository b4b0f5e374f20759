import math

import pytest
import torch
from hypothesis import given

from raypo.ppo.kl import KLController, kl_estimate, kl_loss_terms, kl_statistics
from tests.unit.ppo.steps import INF, NAN, few, random_step, seeds

ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 0.5)],  # l = 0.5; exp(-l) - 1 + l
)
def test_estimators_by_hand(kind, expected):
    kl = kl_estimate(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), kind=kind)

    torch.testing.assert_close(kl, torch.tensor([[expected]]))


def vocabulary(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over 5 tokens, with gradient, and the reference's log-probs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(1, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, reference


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    logits, reference = vocabulary(0)
    policy = logits.detach().log_softmax(-1)

    expected = (policy.exp() * (policy - reference)).sum()  # KL(policy || reference)

    mean = (policy.exp() * kl_estimate(policy, reference, kind=kind)).sum()
    torch.testing.assert_close(mean, expected)


def test_gradient_of_k1_is_zero_in_expectation():
    """Therefore the config refuses k1 as a loss term."""
    logits, reference = vocabulary(2)
    policy = logits.log_softmax(-1)
    k1 = kl_estimate(policy, reference, kind="k1")
    (gradient,) = torch.autograd.grad((policy.detach().exp() * k1).sum(), logits)

    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_k3_as_a_loss_keeps_its_own_gradient_and_k3_st_its_value():
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5]])
    value = math.exp(-0.5) - 0.5

    for kind, slope in [("k2", 0.5), ("k3", 1 - math.exp(-0.5)), ("k3_st", 0.5)]:
        terms = kl_loss_terms(log_probs, reference, ONE, kind=kind)
        (gradient,) = torch.autograd.grad(terms.sum(), log_probs)
        torch.testing.assert_close(gradient, torch.tensor([[slope]]))  # l, 1 - exp(-l), l
        torch.testing.assert_close(
            terms.detach(), torch.tensor([[0.125 if kind == "k2" else value]])
        )


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


@given(seed=seeds)
@few
def test_k3_is_never_negative_and_rubbish_is_ignored(seed):
    step = random_step(seed)
    wide = step.padded(2, NAN)

    kl = kl_estimate(wide.log_probs, wide.old_log_probs, kind="k3", mask=wide.mask)

    assert (kl >= 0).all()
    assert kl[~wide.mask].abs().sum() == 0.0
    stats = kl_statistics(wide.log_probs, wide.old_log_probs, wide.mask)
    torch.testing.assert_close(stats, kl_statistics(step.log_probs, step.old_log_probs, step.mask))


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
