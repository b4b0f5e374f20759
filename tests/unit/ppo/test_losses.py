import math
from typing import Any

import pytest
import torch

from raypo.ppo.losses import aggregate, explained_variance
from raypo.ppo.surrogates import SURROGATES
from tests.unit.ppo.steps import AGGREGATIONS, INF, NAN, policy_loss, random_step, value_loss

MASK = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
X = torch.tensor([[1.0, 3.0, NAN], [8.0, INF, NAN], [NAN, NAN, NAN]])
ONE = torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("aggregation", "count", "expected"),
    [
        ("token_mean", 3, 4.0),  # (1 + 3 + 8) / 3 tokens
        ("sequence_mean", 2, 5.0),  # ((1 + 3) / 2 + 8) / 2 responses with a token
        ("constant", 3, 1.0),  # (1 + 3 + 8) / (3 responses * 4 tokens)
    ],
)
def test_aggregations_by_hand(aggregation, count, expected):
    def loss(normalizer: float) -> float:
        knobs = {"aggregation": aggregation, "max_new_tokens": 4}
        return aggregate(X, MASK, normalizer=normalizer, **knobs).item()

    assert loss(count) == expected
    assert loss(2.0 * count) == expected / 2  # as many lie on another worker
    assert loss(0.5) == loss(0.0) == loss(1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_without_sampled_tokens_has_loss_and_gradient_zero(aggregation):
    x = torch.full((2, 3), NAN, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)

    loss, stats = policy_loss(x, x.detach(), x.detach(), nothing, aggregation=aggregation)
    loss.backward()

    assert loss.item() == stats["tokens"].item() == 0.0
    assert x.grad is not None
    assert x.grad.abs().sum() == 0.0


def one_token(log_ratio: float, advantage: float, **knobs) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient by log-prob and statistics of a single token with old log-prob -2."""
    log_probs = torch.tensor([[-2.0 + log_ratio]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-2.0]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, stats = policy_loss(log_probs, old, advantages, ONE, **knobs)
    loss.backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad.item(), {k: v.item() for k, v in stats.items()}


LOG_HALF, LOG_TWO, LOG_TEN = math.log(0.5), math.log(2.0), math.log(10.0)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "knobs", "loss", "gradient", "clipped"),
    [
        (0.1, 2.0, {}, -2.0 * math.exp(0.1), -2.0 * math.exp(0.1), 0.0),  # inside: -r A
        (LOG_TWO, 3.0, {}, -3.6, 0.0, 1.0),  # -min(2 * 3, 1.2 * 3)
        (LOG_TWO, 3.0, {"clip_high": 0.5}, -4.5, 0.0, 1.0),  # clip-higher: -1.5 * 3
        (LOG_HALF, 3.0, {}, -1.5, -1.5, 0.0),  # -min(0.5 * 3, 0.8 * 3): a way back
        (LOG_HALF, -3.0, {}, 2.4, 0.0, 1.0),  # -min(-1.5, -2.4)
        (LOG_HALF, -3.0, {"clip_low": 0.4}, 1.8, 0.0, 1.0),
        (LOG_TEN, -3.0, {}, 30.0, 30.0, 0.0),  # no upper clip for A < 0
        (LOG_TEN, -3.0, {"dual_clip": 4.0}, 12.0, 0.0, 0.0),  # min(30, 4 * 3)
        (LOG_TEN, 3.0, {"dual_clip": 4.0}, -3.6, 0.0, 1.0),  # dual clip is for A < 0 alone
    ],
)
def test_ppo_by_hand(log_ratio, advantage, knobs, loss, gradient, clipped):
    got_loss, got_gradient, stats = one_token(log_ratio, advantage, **knobs)

    assert got_loss == pytest.approx(loss)
    assert got_gradient == pytest.approx(gradient)
    assert stats["clipped"] == clipped
    assert stats["dual_clipped"] == float("dual_clip" in knobs and advantage < 0)
    assert stats["ratio"] == pytest.approx(math.exp(log_ratio))
    assert stats["approx_kl"] == pytest.approx(math.exp(log_ratio) - 1 - log_ratio)


def test_cispo_by_hand():
    # weight min(2, 1.2), log-prob -2 + log 2: -1.2 * 3 * log-prob; the gradient is kept
    loss, gradient, stats = one_token(LOG_TWO, 3.0, kind="cispo")

    assert loss == pytest.approx(-1.2 * 3.0 * (-2.0 + LOG_TWO))
    assert gradient == pytest.approx(-3.6)
    assert stats["clipped"] == 1.0
    # there is no lower bound, but where one is given
    assert one_token(LOG_HALF, -3.0, kind="cispo")[1] == pytest.approx(1.5)
    assert one_token(LOG_HALF, -3.0, kind="cispo", cispo_low=0.3)[1] == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("old", "new", "advantage", "tv", "kl"),
    [
        (0.5, 0.68, 1.0, 0.18, 0.5 * math.log(0.5 / 0.68) + 0.5 * math.log(0.5 / 0.32)),
        (0.9, 0.7, -1.0, 0.2, 0.9 * math.log(0.9 / 0.7) + 0.1 * math.log(0.1 / 0.3)),
        (0.001, 0.1, 1.0, 0.099, 0.001 * math.log(0.01) + 0.999 * math.log(0.999 / 0.9)),
    ],
)
def test_dppo_bounds_the_change_of_a_probability(old, new, advantage, tv, kl):
    for kind, distance in (("dppo_tv", tv), ("dppo_kl", kl)):

        def of(sign: float, bound: float, kind: str = kind) -> tuple[float, float, Any]:
            log_probs = torch.tensor([[math.log(new)]], requires_grad=True, dtype=torch.float64)
            loss, stats = policy_loss(
                log_probs,
                torch.tensor([[math.log(old)]], dtype=torch.float64),
                torch.full((1, 1), sign * advantage, dtype=torch.float64),
                ONE,
                kind=kind,
                clip_low=bound,
                clip_high=bound,
            )
            (gradient,) = torch.autograd.grad(loss, log_probs)
            return loss.item(), gradient.item(), stats

        plain = pytest.approx(-advantage * new / old)
        assert of(1.0, distance + 1e-6)[:2] == (plain, plain)  # within the bound, at any ratio
        loss, gradient, stats = of(1.0, distance - 1e-6)
        assert (loss, gradient, stats["clipped"]) == (0.0, 0.0, 1.0)
        # back towards the old policy: never held
        assert of(-1.0, distance - 1e-6)[1] == pytest.approx(advantage * new / old)


def test_gspo_has_one_ratio_a_response():
    log_probs = torch.tensor([[-1.0, -1.0, NAN]], requires_grad=True)
    old = torch.tensor([[-1.1, -1.5, NAN]])  # mean log-ratio (0.1 + 0.5) / 2 = 0.3
    mask = torch.tensor([[True, True, False]])
    advantages = torch.full((1, 3), 2.0)

    loss, stats = policy_loss(
        log_probs,
        old,
        advantages,
        mask,
        kind="gspo",
        clip_high=0.5,
        aggregation="sequence_mean",
    )
    loss.backward()

    ratio = math.exp(0.3)
    assert loss.item() == pytest.approx(-2.0 * ratio)
    assert stats["ratio"].item() == pytest.approx(2 * ratio)
    # half of the loss's change by each of the two log-probs
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-ratio, -ratio, 0.0]]))
    clipped, stats = policy_loss(log_probs, old, advantages, mask, kind="gspo", clip_high=0.1)
    assert clipped.item() == pytest.approx(-2.2)
    assert stats["clipped"].item() == 2.0


def test_gmpo_is_the_geometric_mean_of_ratios_that_are_clipped_first():
    log_probs = torch.tensor([[-1.0, -1.0, NAN]], requires_grad=True)
    old = torch.tensor([[-1.1, -2.0, NAN]])  # log-ratios 0.1 and 1.0, of which 0.4 is left
    mask = torch.tensor([[True, True, False]])
    knobs = {"kind": "gmpo", "clip_high": math.expm1(0.4), "aggregation": "sequence_mean"}

    loss, stats = policy_loss(log_probs, old, torch.full((1, 3), 2.0), mask, **knobs)
    loss.backward()

    ratio = math.exp((0.1 + 0.4) / 2)
    assert loss.item() == pytest.approx(-2.0 * ratio)
    assert stats["clipped"].item() == 1.0
    # d/dx of -2 exp((x + 0.4) / 2), and none through the token that is clipped
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-ratio, 0.0, 0.0]]))
    away = policy_loss(old, log_probs.detach(), torch.full((1, 3), -2.0), mask, **knobs)[0]
    assert away.item() == pytest.approx(2.0 * math.exp((-0.1 + math.log(0.8)) / 2))


def test_what_clip_cov_and_kl_cov_do_to_the_tokens_that_they_hold():
    held = {"covariant": ONE, "covariance_kl": 0.5}
    loss, gradient, stats = one_token(0.1, 1.0, kind="clip_cov", **held)
    assert (loss, gradient, stats["clipped"]) == (0.0, 0.0, 1.0)
    for log_ratio in (LOG_TEN, -LOG_TEN):  # no clip, and a pull back of 0.5 a nat
        ratio = math.exp(log_ratio)
        loss, gradient, stats = one_token(log_ratio, 3.0, kind="kl_cov", **held)
        assert loss == pytest.approx(-3 * ratio + 0.5 * LOG_TEN)
        assert gradient == pytest.approx(-3 * ratio + math.copysign(0.5, log_ratio))
        assert stats["clipped"] == 0.0


@pytest.mark.parametrize("kind", SURROGATES)
def test_first_update_has_ratio_exactly_one(kind):
    step = random_step(0)
    current = step.old_log_probs.clone().requires_grad_()

    loss, stats = policy_loss(
        current,
        step.old_log_probs,
        step.advantages,
        step.mask,
        kind=kind,
        covariant=torch.zeros_like(step.mask),
    )
    loss.backward()

    assert stats["ratio"].item() == stats["tokens"].item()
    assert stats["clipped"].item() == stats["approx_kl"].item() == 0.0
    # and then the gradient is the plain policy gradient, whatever the kind
    expected = torch.where(step.mask, -step.advantages / step.mask.sum(), 0.0)
    torch.testing.assert_close(current.grad, expected)


@pytest.mark.parametrize("kind", SURROGATES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(
    "pair", [(-1e4, -1.0), (-1.0, -1e4), (-INF, -1.0), (-1.0, -INF), (-INF, -INF)]
)
def test_extreme_log_ratios_have_finite_loss_and_gradient(kind, advantage, pair):
    log_probs = torch.tensor([[pair[0], -1.0]], requires_grad=True)
    old = torch.tensor([[pair[1], -1.0]])
    both = torch.ones(1, 2, dtype=torch.bool)

    loss, stats = policy_loss(
        log_probs, old, torch.full((1, 2), advantage), both, kind=kind, covariant=both
    )
    loss.backward()

    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert all(value.isfinite() for value in stats.values())
    assert stats["clamped"].item() == float(pair[0] != pair[1])


def test_the_kl_of_an_update_counts_a_token_that_fell_out_of_reach_in_full():
    stats = one_token(-40.0, 1.0)[2]

    assert stats["approx_kl"] == pytest.approx(39.0)  # k3 at l = old - new = 40
    assert stats["clamped"] == 1.0  # the ratio's clamp


def test_a_diverged_policy_is_not_hidden():
    log_probs = torch.tensor([[NAN]], requires_grad=True)

    loss, _ = policy_loss(log_probs, torch.tensor([[-1.0]]), torch.ones(1, 1), ONE)

    assert loss.isnan()


@pytest.mark.parametrize(
    ("value", "value_clip", "loss", "gradient", "clipped"),
    [
        (3.0, None, 2.0, 2.0, 0.0),  # 0.5 * (3 - 1)^2
        (3.0, 0.5, 2.0, 2.0, 0.0),  # clipped to 0.5, nearer: the worse, 2.0, counts
        (0.8, 0.5, 0.125, 0.0, 1.0),  # clipped to 0.5: 0.5 * 0.25 is worse than 0.5 * 0.04
        (0.3, 0.5, 0.245, -0.7, 0.0),  # inside: 0.5 * 0.49
    ],
)
@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_value_loss_by_hand(value, value_clip, loss, gradient, clipped, shift):
    """Old value 0, return 1; and all of them two higher, for the clip is around the old value."""
    values = torch.tensor([[value + shift]], dtype=torch.float64, requires_grad=True)
    old, target = torch.full((2, 1, 1), shift, dtype=torch.float64).unbind()

    got, stats = value_loss(values, old, target + 1.0, ONE, value_clip=value_clip)
    got.backward()

    assert got.item() == pytest.approx(loss)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient)
    assert stats["clipped"].item() == clipped
    assert stats["squared_error"].item() == pytest.approx((value - 1.0) ** 2)


def test_explained_variance_by_hand():
    mask = torch.ones(1, 2, dtype=torch.bool)
    returns = torch.tensor([[1.0, 3.0]])  # variance 1

    def explained(values):
        values = torch.tensor([values])
        return explained_variance(value_loss(values, values, returns, mask)[1]).item()

    assert explained([1.0, 3.0]) == 1.0
    assert explained([5.0, 7.0]) == 1.0  # a constant error varies not
    assert explained([2.0, 2.0]) == 0.0
    assert explained([3.0, 1.0]) == -3.0  # errors 2 and -2: 1 - 4 / 1
    flat = torch.ones(1, 2)
    assert explained_variance(value_loss(returns, flat, flat, mask)[1]).item() == 0.0


def test_a_value_that_moved_less_than_its_clip_is_not_counted_by_rounding():
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = torch.randn(3, 8, 64, generator=generator)
    mask = torch.ones(8, 64, dtype=torch.bool)
    _, stats = value_loss(values, old_values, returns, mask, value_clip=100.0)
    assert stats["clipped"] == 0
