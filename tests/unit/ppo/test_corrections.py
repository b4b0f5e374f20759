import math
from typing import Any

import pytest
import torch
from torch import Tensor

from raypo.config import CorrectionSection
from raypo.ppo.corrections import (
    DEFAULT_CAPS,
    bounded_weights,
    mismatch_statistics,
    off_policy_tokens,
)
from tests.unit.ppo.steps import AGGREGATIONS, CORRECTIONS, INF, NAN, policy_loss

MASK = torch.tensor([[True, True, False], [True, True, False]])
ROLLOUT = torch.full((2, 3), -1.0).masked_fill(~MASK, NAN)
# ratios 4 and 1/2: product 2, geometric mean sqrt(2); then 1 and 1
OLD = ROLLOUT + torch.tensor([[4.0, 0.5, 1.0], [1.0, 1.0, 1.0]]).log()


def weights_of(old: Tensor, rollout: Tensor, mask: Tensor, **keys: Any) -> Tensor:
    """Weights under the given keys of `ppo.correction`, whether idle or not."""
    section = CorrectionSection.model_construct(**keys)
    return bounded_weights(old, rollout, mask, section)[0]


@pytest.mark.parametrize(
    ("kind", "bounds", "first_row", "clipped"),
    [
        ("none", {}, [1.0, 1.0], [False, False]),
        ("tis", {"cap": 3.0}, [3.0, 0.5], [True, False]),
        ("sequence_tis", {"cap": 3.0}, [2.0, 2.0], [False, False]),
        ("sequence_tis", {"cap": 1.5}, [1.5, 1.5], [True, True]),
        ("geometric_tis", {"cap": 3.0}, [2**0.5, 2**0.5], [False, False]),
        ("geometric_tis", {"cap": 1.2}, [1.2, 1.2], [True, True]),
        ("icepop", {"low": 0.5, "high": 3.0}, [0.0, 0.5], [True, False]),
        ("icepop", {"low": 0.6, "high": 5.0}, [4.0, 0.0], [False, True]),
        # sqrt(2) is inside: tis weights with a cap of their own; or outside: all dropped
        ("mis", {"low": 0.9, "high": 1.5}, [2.0, 0.5], [True, False]),
        ("mis", {"low": 0.9, "high": 1.5, "cap": 9.0}, [4.0, 0.5], [False, False]),
        ("mis", {"low": 0.9, "high": 1.4, "cap": 9.0}, [0.0, 0.0], [True, True]),
        # the product is 2
        ("mis", {"mask_ratio": "product", "high": 2.1, "cap": 3.0}, [3.0, 0.5], [True, False]),
        ("mis", {"mask_ratio": "product", "high": 1.9}, [0.0, 0.0], [True, True]),
        # the smallest ratio is 0.5
        ("none", {"token_veto": 0.4}, [1.0, 1.0], [False, False]),
        ("none", {"token_veto": 0.6}, [0.0, 0.0], [True, True]),
        ("tis", {"cap": 3.0, "token_veto": 0.4}, [3.0, 0.5], [True, False]),
        ("tis", {"cap": 3.0, "token_veto": 0.6}, [0.0, 0.0], [True, True]),
        ("icepop", {"token_veto": 0.6}, [0.0, 0.0], [True, True]),
    ],
)
def test_weights_by_hand(kind, bounds, first_row, clipped):
    weights, cut = bounded_weights(OLD, ROLLOUT, MASK, CorrectionSection(kind=kind, **bounds))

    torch.testing.assert_close(weights, torch.tensor([[*first_row, 0.0], [1.0, 1.0, 0.0]]))
    assert cut.tolist() == [[*clipped, False], [False, False, False]]


@pytest.mark.parametrize(
    ("kind", "mask_ratio", "nats", "expected"),
    [
        ("tis", "geometric", 40.0, math.exp(0.08)),  # of a token
        ("tis", "geometric", 500.0, 2.0),
        ("sequence_tis", "geometric", 40.0, 2.0),
        ("sequence_tis", "geometric", -40.0, math.exp(-40.0)),
        ("geometric_tis", "geometric", 40.0, 1.001),
        ("geometric_tis", "geometric", -40.0, math.exp(-0.08)),
        ("icepop", "geometric", 40.0, math.exp(0.08)),
        ("icepop", "geometric", 1000.0, 0.0),  # a ratio of e * e is above 5
        ("icepop", "geometric", -500.0, 0.0),  # 1 / e is below 0.5
        ("mis", "geometric", 40.0, 0.0),
        ("mis", "geometric", -40.0, 0.0),
        ("mis", "geometric", 0.4, math.exp(0.0008)),  # inside 0.999 to 1.001
        ("mis", "product", 40.0, 0.0),
        ("mis", "product", -40.0, 0.0),
        ("mis", "product", 0.4, math.exp(0.0008)),  # exp(0.4) is inside 0.5 to 2
        ("mis", "product", 0.8, 0.0),
    ],
)
def test_a_response_that_drifts_meets_the_default_mask_or_cap(kind, mask_ratio, nats, expected):
    """500 tokens, each drifting as far; `nats` is the sum."""
    rollout = torch.full((1, 500), -2.0, dtype=torch.float64)
    mask = torch.ones(1, 500, dtype=torch.bool)

    weights = weights_of(rollout + nats / 500, rollout, mask, kind=kind, mask_ratio=mask_ratio)

    torch.testing.assert_close(weights, torch.full_like(weights, expected))


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("bounds", [{}, {"mask_ratio": "product", "token_veto": 1e-4}])
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
def test_weights_are_bounded_whatever_the_log_probs(kind, bounds, pair):
    old = torch.tensor([[pair[0], -1.0, NAN]])
    rollout = torch.tensor([[pair[1], -1.0, INF]])
    mask = torch.tensor([[True, True, False]])

    weights = weights_of(old, rollout, mask, kind=kind, **bounds)

    assert weights.isfinite().all()
    assert weights[0, 2].item() == 0.0
    highest = {"none": 1.0, "icepop": 5.0}.get(kind) or DEFAULT_CAPS[kind]
    assert 0.0 <= weights.min().item() <= weights.max().item() <= highest + 1e-6
    log_probs = torch.tensor([[-1.5, -1.0, NAN]], requires_grad=True)
    loss, _ = policy_loss(log_probs, old.nan_to_num(-2.0), torch.ones(1, 3), mask, weights=weights)
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_dropped_response_stays_in_the_denominator(aggregation):
    rollout = torch.full((2, 4), -1.0)
    old = rollout + torch.tensor([[0.0], [10.0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    weights = weights_of(old, rollout, mask, kind="mis")
    knobs = {"aggregation": aggregation, "max_new_tokens": 4, "weights": weights}

    loss, stats = policy_loss(old, old, torch.ones(2, 4), mask, **knobs)

    assert loss.item() == -0.5  # four tokens of loss -1 and four of loss 0
    assert stats["tokens"].item() == 8.0


@pytest.mark.parametrize("kind", ["sequence_tis", "geometric_tis", "mis"])
def test_one_unknown_token_drops_a_response_that_is_judged_as_a_whole(kind):
    rollout = torch.tensor([[NAN, -1.0], [-1.0, -1.0]])

    weights = weights_of(
        torch.full((2, 2), -1.0), rollout, torch.ones(2, 2, dtype=torch.bool), kind=kind
    )

    assert weights.tolist() == ([[0.0, 0.0], [1.0, 1.0]])


def test_the_off_policy_mask_by_hand():
    """Drifts of 0.2 and 0.6 nats per token; then one that is unknown, and one of an impossible
    token."""
    log_probs = torch.tensor([[-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [-INF, -2.0]])
    rollout = log_probs + torch.tensor([[0.1, 0.3], [1.4, -0.2], [NAN, 0.0], [0.0, 0.0]])
    rollout[3] = -1.0
    advantages = torch.tensor([[-1.0, -1.0], [-1.0, 0.0], [2.0, -1.0], [-1.0, -1.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)

    dropped = off_policy_tokens(log_probs, rollout, advantages, mask, 0.5)

    assert dropped.tolist() == [[False, False], [True, False], [False, True], [True, True]]
    one = mask.clone()
    one[1, 0] = False  # a drift of -0.2 is left
    assert not off_policy_tokens(log_probs, rollout, -advantages.abs(), one, 0.5)[1].any()


def test_weights_carry_no_gradient():
    old = OLD.clone().requires_grad_()

    assert not weights_of(old, ROLLOUT, MASK, kind="tis").requires_grad


def test_mismatch_by_hand():
    section = CorrectionSection(kind="tis", cap=3.0)
    _, clipped = bounded_weights(OLD, ROLLOUT, MASK, section)

    stats = mismatch_statistics(OLD, ROLLOUT, MASK, clipped)

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

    stats = mismatch_statistics(torch.tensor([[-1.0, -1.5]]), rollout, mask, ~mask)

    assert stats["unknown"].item() == 1.0
    assert stats["abs_difference_max"].item() == 0.5


def test_the_mismatch_of_a_token_that_the_learner_all_but_rules_out_is_not_clamped():
    one = torch.ones(1, 1, dtype=torch.bool)

    old, rollout = torch.tensor([[-41.0], [-1.0]], dtype=torch.float64).split(1)
    stats = mismatch_statistics(old, rollout, one, ~one)

    # k3 at l = rollout - old = 40: 40 - 1 + exp(-40)
    assert stats["kl"].item() == pytest.approx(39.0)
