from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.ppo.groups import filter_groups, pass_at_k
from tests.unit.ppo.steps import NAN, few


def test_groups_are_kept_if_their_scores_differ():
    scores = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])

    assert filter_groups(scores).tolist() == [False, True, False]


@pytest.mark.parametrize("score", [0.1, 0.7, 1e6 / 3])
def test_equal_scores_never_differ_by_rounding(score):
    for n in range(2, 12):
        scores = torch.full((1, n), score, dtype=torch.float64)
        assert not filter_groups(scores, min_std=0.0).any()


def test_range_of_the_mean_and_least_deviation():
    scores = torch.tensor([[0.0, 0.2], [0.0, 1.0], [0.8, 1.0]])  # means 0.1, 0.5, 0.9

    assert filter_groups(scores, low=0.2, high=0.8).tolist() == [False, True, False]
    assert filter_groups(scores, low=0.2).tolist() == [False, True, True]
    assert filter_groups(scores, min_std=0.2).tolist() == [False, True, False]  # 0.1, 0.5, 0.1
    assert filter_groups(scores, low=0.5).tolist() == [False, False, True]  # strictly above
    with pytest.raises(ValueError, match="low"):
        filter_groups(scores, low=0.8, high=0.2)


def test_samples_that_failed_are_left_out():
    scores = torch.tensor([[1.0, NAN, 1.0], [1.0, NAN, 0.0], [1.0, NAN, NAN]])

    assert filter_groups(scores, valid=~scores.isnan()).tolist() == [False, True, False]


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
