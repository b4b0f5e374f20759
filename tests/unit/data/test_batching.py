from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.data.batching import batches_by_tokens


def test_rows_of_a_prompt_stay_together_and_pay_for_it_once() -> None:
    assert batches_by_tokens("aab", [3, 3, 2], [4, 1, 2], 8) == [[0, 1], [2]]
    assert batches_by_tokens("aab", [3, 3, 2], [4, 1, 2], 12) == [[0, 1, 2]]


def test_the_rests_of_prompts_that_are_cut_share_packs() -> None:
    prompts, samples, budget = 32, 8, 4096
    rows = [prompt for prompt in range(prompts) for _ in range(samples)]
    packs = batches_by_tokens(rows, [256] * len(rows), [512] * len(rows), budget)
    # 7 responses fill a pack: (4096 - 256) // 512. Of the 32 left over, with prompts, 5 do.
    assert sorted(map(len, packs), reverse=True) == [7] * 32 + [5] * 6 + [2]


def test_a_small_prompt_fills_what_a_large_one_leaves() -> None:
    # First fit of 60, 50, 40 and 30 tokens; without looking back there would be three packs.
    assert batches_by_tokens("abcd", [10] * 4, [50, 40, 30, 20], 90) == [[0, 3], [1, 2]]


def test_packs_with_most_tokens_come_first() -> None:
    assert batches_by_tokens("abc", [1, 1, 1], [2, 4, 3], 5) == [[1], [2], [0]]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=20),
    st.lists(st.integers(1, 20), min_size=5, max_size=5),
    st.integers(1, 100),
)
def test_every_row_once_and_the_budget_is_exact(
    rows: list[tuple[int, int]], of_prompt: list[int], max_tokens: int
) -> None:
    prompts = [prompt for prompt, _ in rows]
    responses = [length for _, length in rows]
    prompt_lengths = [of_prompt[prompt] for prompt in prompts]

    batches = batches_by_tokens(prompts, prompt_lengths, responses, max_tokens)

    assert sorted(row for batch in batches for row in batch) == list(range(len(rows)))
    for batch in batches:
        shared = sum(of_prompt[prompt] for prompt in {prompts[row] for row in batch})
        tokens = shared + sum(responses[row] for row in batch)
        assert tokens <= max_tokens or len(batch) == 1


def test_rows_that_are_not_packed_count_their_prompt_and_padding_each():
    assert batches_by_tokens("aab", [3, 3, 2], [4, 1, 2], 14, is_packed=False) == [[0, 1], [2]]
    assert batches_by_tokens("aab", [3, 3, 2], [4, 1, 2], 13, is_packed=False) == [[0], [1, 2]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20),
    max_tokens=st.integers(1, 40),
)
def test_no_padded_batch_of_several_rows_exceeds_the_budget(lengths, max_tokens):
    prompts, responses = [p for p, _ in lengths], [r for _, r in lengths]
    batches = batches_by_tokens(prompts, prompts, responses, max_tokens, is_packed=False)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        longest = max(prompts[row] + responses[row] for row in rows)
        assert len(rows) == 1 or len(rows) * longest <= max_tokens
