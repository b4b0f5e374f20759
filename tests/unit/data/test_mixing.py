"""Several sources with weights: exact shares, one order for one seed, resumed at any draw."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypo.config import DataSection
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.stream import Mix, ShuffledStream
from tests.unit.data.prompt_files import refused

SIZES = (3, 5, 4)
WEIGHTS = (6.0, 3.0, 1.0)
ITEMS = [(source, n) for source, size in enumerate(SIZES) for n in range(size)]


def stream(weights=WEIGHTS, *, block=10, seed=0):
    return ShuffledStream(ITEMS, seed=seed, mix=Mix(SIZES, weights, block))


def drawn(of, count):
    return [item for _, item in of.take(count)]


def section(*weights):
    sources = [{"path": f"{n}.jsonl", "weight": weight} for n, weight in enumerate(weights)]
    return DataSection.model_validate({"prompts": sources})


@settings(deadline=None)
@given(
    weights=st.lists(st.integers(1, 50), min_size=3, max_size=3),
    block=st.integers(1, 16),
    blocks=st.integers(1, 40),
)
def test_no_source_is_a_draw_behind_its_share_or_ahead_of_it_after_any_block(
    weights, block, blocks
):
    sources = [
        source
        for source, _ in drawn(stream(tuple(map(float, weights)), block=block), block * blocks)
    ]
    for n, weight in enumerate(weights):
        share = Fraction(weight, sum(weights)) * block * blocks
        assert abs(sources.count(n) - share) <= 1, "Webster's method with three sources"


def test_each_source_has_epochs_of_its_own():
    of = [item for item in drawn(stream(), 500) if item[0] == 1]
    assert len(of) == 150
    epochs = [of[first : first + 5] for first in range(0, 150, 5)]
    # Within a step the order is shuffled, so an epoch is whole once its step is.
    assert [sum(item == (1, n) for item in of) for n in range(5)] == [30] * 5
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_sources_come_in_a_seeded_order_and_not_by_turns():
    first, same, other = (drawn(stream((1.0, 1.0, 1.0), seed=seed), 60) for seed in (7, 7, 8))
    assert first == same != other
    by_worker = [source for source, _ in first[::3]]
    assert len(set(by_worker)) == 3, "else one worker would have all of a source"


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 9), max_size=6))
def test_how_many_are_taken_at_once_changes_nothing(cuts):
    in_parts, at_once = stream(), stream()
    parts = [draw for cut in cuts for draw in in_parts.take(cut)]
    assert parts == at_once.take(sum(cuts))


@pytest.mark.parametrize("position", [0, 1, 9, 10, 11, 95, 12_345])
def test_a_stream_goes_on_at_any_draw_from_its_position_alone(position):
    whole, resumed = stream(), stream()
    whole.take(position)
    resumed.load_state_dict(whole.state_dict())
    assert whole.state_dict() == {"position": position}
    assert resumed.take(25) == whole.take(25)


def test_other_items_are_drawn_at_the_same_places():
    of = stream()
    places = [place for _, place in of.of(range(len(ITEMS))).take(40)]
    assert [ITEMS[place] for place in places] == drawn(of, 40)


def test_without_weights_sources_are_one():
    assert mix_of(DataSection(prompts=("a.jsonl", "b.jsonl")), (3, 5), 4) is None


def test_weights_make_a_mix():
    assert mix_of(section(0.7, 0.3), (3, 5), 4) == Mix((3, 5), (0.7, 0.3), 4)


def test_a_source_with_a_weight_and_no_rows_is_refused():
    assert refused(mix_of, section(0.7, 0.3), (3, 0), 4) == (
        "data.prompts (1.jsonl): none of its rows can be used, but it has the weight 0.3. "
        "Raise data.max_prompt_tokens, or remove it."
    )


def test_a_source_that_is_smaller_than_its_share_of_a_step_is_told():
    assert few_rows_notes(section(3.0, 1.0), (6, 1), 8) == [
        "1 has 1 rows, but a step takes 2 of them (its weight is 1, rollout.prompts_per_step "
        "8), so they repeat within a step; give more, or a lower weight"
    ]
    assert few_rows_notes(section(3.0, 1.0), (6, 2), 8) == []
    assert few_rows_notes(DataSection(prompts=("a.jsonl",)), (3,), 4, key="learner.batch_size") == [
        "a step takes 4 examples (learner.batch_size), but data.prompts has only 3, so examples "
        "repeat within a step; give more, or set learner.batch_size to at most 3"
    ]
