import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.ppo.corrections import (
    CORRECTION_KINDS,
    USUAL_BOUNDS,
    bounded_weights,
    importance_weights,
    mismatch_by_lag,
    mismatch_statistics,
)
from tests.unit.ppo.steps import INF, NAN, few, random_step, seeds

MASK = torch.tensor([[True, True, False], [True, True, False]])
ROLLOUT = torch.full((2, 3), -1.0).masked_fill(~MASK, NAN)
# ratios 4 and 1/2: product 2, geometric mean sqrt(2); then 1 and 1
OLD = ROLLOUT + torch.tensor([[4.0, 0.5, 1.0], [1.0, 1.0, 1.0]]).log()


@pytest.mark.parametrize(
    ("kind", "low", "high", "first_row", "clipped"),
    [
        ("none", None, None, [1.0, 1.0], [False, False]),
        ("tis", None, 3.0, [3.0, 0.5], [True, False]),
        ("sequence_tis", None, 3.0, [2.0, 2.0], [False, False]),
        ("sequence_tis", None, 1.5, [1.5, 1.5], [True, True]),
        ("geometric_tis", None, 3.0, [2**0.5, 2**0.5], [False, False]),
        ("geometric_tis", None, 1.2, [1.2, 1.2], [True, True]),
        ("icepop", 0.5, 3.0, [0.0, 0.5], [True, False]),
        ("icepop", 0.6, 5.0, [4.0, 0.0], [False, True]),
        ("mis", 0.9, 1.5, [1.5, 0.5], [True, False]),  # sqrt(2) is inside: tis weights
        ("mis", 0.9, 1.2, [0.0, 0.0], [True, True]),  # sqrt(2) is outside: all dropped
    ],
)
def test_weights_by_hand(kind, low, high, first_row, clipped):
    weights, cut = bounded_weights(OLD, ROLLOUT, MASK, kind=kind, low=low, high=high)

    torch.testing.assert_close(weights, torch.tensor([[*first_row, 0.0], [1.0, 1.0, 0.0]]))
    assert cut.tolist() == [[*clipped, False], [False, False, False]]
    assert torch.equal(
        weights, importance_weights(OLD, ROLLOUT, MASK, kind=kind, low=low, high=high)
    )


@pytest.mark.parametrize("kind", CORRECTION_KINDS)
@pytest.mark.parametrize(
    "pair",
    [
        (-1e4, -1.0),
        (-1.0, -1e4),
        (-INF, -1.0),
        (-1.0, -INF),
        (-INF, -INF),
        (-1.0, NAN),
        (NAN, -1.0),
    ],
)
def test_weights_are_bounded_whatever_the_log_probs(kind, pair):
    old = torch.tensor([[pair[0], -1.0, NAN]])
    rollout = torch.tensor([[pair[1], -1.0, INF]])
    mask = torch.tensor([[True, True, False]])

    weights = importance_weights(old, rollout, mask, kind=kind)

    assert weights.isfinite().all()
    assert weights[0, 2].item() == 0.0
    highest = 1.0 if kind == "none" else USUAL_BOUNDS[kind][1]
    assert 0.0 <= weights.min().item() <= weights.max().item() <= highest


@pytest.mark.parametrize("kind", ["sequence_tis", "geometric_tis", "mis"])
def test_one_unknown_token_drops_a_response_that_is_judged_as_a_whole(kind):
    rollout = torch.tensor([[NAN, -1.0], [-1.0, -1.0]])

    weights = importance_weights(
        torch.full((2, 2), -1.0), rollout, torch.ones(2, 2, dtype=torch.bool), kind=kind
    )

    assert weights.tolist() == ([[0.0, 0.0], [1.0, 1.0]])


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()

    assert not importance_weights(old, ROLLOUT, MASK, kind="tis").requires_grad


def test_equal_engines_have_weight_one():
    for kind in CORRECTION_KINDS:
        weights, clipped = bounded_weights(ROLLOUT, ROLLOUT, MASK, kind=kind)
        assert torch.equal(weights, MASK.float())
        assert not clipped.any()


@given(seed=seeds, kind=st.sampled_from(CORRECTION_KINDS), rubbish=st.sampled_from([INF, NAN]))
@few
def test_padding_and_row_order_change_no_weight(seed, kind, rubbish):
    step = random_step(seed)
    wide = step.padded(2, rubbish)

    clean = importance_weights(step.log_probs, step.old_log_probs, step.mask, kind=kind)
    dirty = importance_weights(wide.log_probs, wide.old_log_probs, wide.mask, kind=kind)
    back = step.of(torch.arange(len(step.mask)).flip(0))

    torch.testing.assert_close(dirty[:, : step.mask.shape[1]], clean)
    assert dirty[:, step.mask.shape[1] :].abs().sum() == 0.0
    torch.testing.assert_close(
        importance_weights(back.log_probs, back.old_log_probs, back.mask, kind=kind).flip(0), clean
    )


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("icepop", 2.0, 1.0), ("mis", -0.1, 1.0), ("tis", None, 0.0)]
)
def test_impossible_bounds_are_refused(kind, low, high):
    with pytest.raises(ValueError, match=r"low \(.*high \("):
        importance_weights(OLD, ROLLOUT, MASK, kind=kind, low=low, high=high)


def test_unknown_kind_names_the_allowed_ones():
    with pytest.raises(ValueError, match=r"'is'.*none, tis, sequence_tis"):
        importance_weights(OLD, ROLLOUT, MASK, kind="is")


def test_mismatch_by_hand():
    _, clipped = bounded_weights(OLD, ROLLOUT, MASK, kind="tis", high=3.0)

    stats = mismatch_statistics(OLD, ROLLOUT, MASK, clipped=clipped)

    # log 4 and log 1/2; k3 of old against rollout: (4 - 1 - log 4) + (1/2 - 1 - log 1/2)
    expected = {
        "tokens": 4.0,
        "abs_difference": math.log(4.0) + math.log(2.0),
        "abs_difference_max": math.log(4.0),
        "kl": 2.5 - math.log(2.0),
        "clipped": 1.0,
        "unknown": 0.0,
    }
    assert {k: v.item() for k, v in stats.items()} == pytest.approx(expected, rel=1e-6)


def test_unknown_log_probs_are_counted_and_spoil_nothing():
    rollout = torch.tensor([[NAN, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)

    stats = mismatch_statistics(torch.tensor([[-1.0, -1.5]]), rollout, mask)

    assert stats["unknown"].item() == 1.0
    assert stats["abs_difference_max"].item() == 0.5


def test_the_mismatch_of_a_token_that_the_learner_all_but_rules_out_is_not_clamped():
    one = torch.ones(1, 1, dtype=torch.bool)

    stats = mismatch_statistics(torch.tensor([[-41.0]]).double(), -torch.ones(1, 1).double(), one)

    # k3 at l = rollout - old = 40: 40 - 1 + exp(-40)
    assert stats["kl"].item() == pytest.approx(39.0)


def test_mismatch_by_lag_splits_the_tokens_and_keeps_their_sum():
    lag = torch.tensor([0, 7])

    by_lag = mismatch_by_lag(OLD, ROLLOUT, MASK, lag, max_lag=2)

    assert [stats["tokens"].item() for stats in by_lag] == [2.0, 0.0, 2.0]
    whole = mismatch_statistics(OLD, ROLLOUT, MASK)
    torch.testing.assert_close(sum(stats["kl"] for stats in by_lag), whole["kl"])
