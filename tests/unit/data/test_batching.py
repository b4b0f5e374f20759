from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypo.data.batching import batches_by_tokens


def test_rows_of_like_length_share_a_batch() -> None:
    assert batches_by_tokens([3, 5, 3, 4], 8) == [[1], [3, 0], [2]]


def test_rows_of_one_length_keep_their_order() -> None:
    assert batches_by_tokens([2, 2, 2, 2, 2], 4) == [[0, 1], [2, 3], [4]]


def test_a_row_over_the_budget_is_alone() -> None:
    assert batches_by_tokens([1, 9, 1], 4) == [[1], [0, 2]]


def test_no_rows_no_batches() -> None:
    assert batches_by_tokens([], 4) == []


def test_budget_is_positive() -> None:
    with pytest.raises(ValueError, match=r"max_tokens \(0\)"):
        batches_by_tokens([1], 0)


@given(st.lists(st.integers(1, 30)), st.integers(1, 100))
def test_every_row_once_and_padding_counts(lengths: list[int], max_tokens: int) -> None:
    batches = batches_by_tokens(lengths, max_tokens)

    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[row] for row in batch)
        assert padded <= max_tokens or len(batch) == 1
