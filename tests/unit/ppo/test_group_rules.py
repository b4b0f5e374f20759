from math import comb
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.config import FilterSection
from raypo.ppo.groups import filter_groups, pass_at_k
from tests.unit.ppo.steps import NAN, few


def kept(scores: torch.Tensor, **keys: Any) -> list[bool]:
    """Groups that pass by keys of `ppo.filter`; samples that are NaN failed."""
    return filter_groups(scores, ~scores.isnan(), FilterSection(**keys)).tolist()


def test_groups_are_kept_if_their_scores_differ():
    scores = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])

    assert kept(scores) == [False, True, False]


@pytest.mark.parametrize("score", [0.1, 0.7, 1e6 / 3])
def test_equal_scores_never_differ_by_rounding(score):
    for n in range(2, 12):
        scores = torch.full((1, n), score, dtype=torch.float64)
        assert not any(kept(scores, min_std=0.0))


def test_range_of_the_mean_and_least_deviation():
    scores = torch.tensor([[0.0, 0.2], [0.0, 1.0], [0.8, 1.0]])  # means 0.1, 0.5, 0.9

    assert kept(scores, low=0.2, high=0.8) == [False, True, False]
    assert kept(scores, low=0.2) == [False, True, True]
    assert kept(scores, min_std=0.2) == [False, True, False]  # 0.1, 0.5, 0.1
    assert kept(scores, low=0.5) == [False, False, True]  # strictly above


def test_samples_that_failed_are_left_out():
    scores = torch.tensor([[1.0, NAN, 1.0], [1.0, NAN, 0.0], [1.0, NAN, NAN]])

    assert kept(scores) == [False, True, False]


def test_pass_at_k_by_hand():
    correct, samples = torch.tensor([0, 1, 2, 4]), torch.full((4,), 4)

    # 1 - C(4 - c, 2) / C(4, 2) = 1 - 6/6, 1 - 3/6, 1 - 1/6, 1 - 0
    torch.testing.assert_close(
        pass_at_k(correct, samples, k=2), torch.tensor([0.0, 0.5, 5 / 6, 1.0]).double()
    )
    assert pass_at_k(correct, samples, k=1).tolist() == [0.0, 0.25, 0.5, 1.0]


@given(samples=st.integers(1, 300), data=st.data())
@few
def test_pass_at_k_agrees_with_binomials(samples, data):
    correct, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))

    got = pass_at_k(torch.tensor([correct]), torch.tensor([samples]), k=k).item()

    assert got == pytest.approx(1 - comb(samples - correct, k) / comb(samples, k), abs=1e-12)


@pytest.mark.parametrize(("correct", "k"), [(1, 0), (1, 5), (5, 2), (-1, 2)])
def test_impossible_counts_are_refused(correct, k):
    with pytest.raises(ValueError, match="must lie between"):
        pass_at_k(torch.tensor([correct]), torch.tensor([4]), k=k)
