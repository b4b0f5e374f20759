import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypo.data.stream import ShuffledStream
from raypo.types import Prompt


def prompts(count):
    return [Prompt(i, f"prompt {i}", np.array([i], np.int32)) for i in range(count)]


def indices(draws: list[tuple[int, Prompt]]) -> list[int]:
    return [prompt.index for _, prompt in draws]


def test_each_epoch_draws_every_prompt_once_in_an_order_of_its_own():
    stream = ShuffledStream(prompts(50), seed=0)
    first, second = indices(stream.take(50)), indices(stream.take(50))

    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_the_order_depends_on_the_seed_alone():
    draws = [indices(ShuffledStream(prompts(50), seed=seed).take(100)) for seed in (7, 7, 8)]
    assert draws[0] == draws[1] != draws[2]


def test_seeds_next_to_each_other_do_not_share_epochs_shifted_by_one():
    zero, one = (ShuffledStream(prompts(50), seed=seed) for seed in (0, 1))
    zero.take(50)
    assert indices(zero.take(50)) != indices(one.take(50))


def test_draws_are_counted_over_the_run():
    stream = ShuffledStream(prompts(3), seed=0)
    assert [position for position, _ in stream.take(2)] == [0, 1]
    assert [position for position, _ in stream.take(3)] == [2, 3, 4]


@given(cuts=st.lists(st.integers(0, 9), max_size=6))
def test_how_many_are_taken_at_once_changes_nothing(cuts):
    in_parts, at_once = (ShuffledStream(prompts(4), seed=3) for _ in range(2))
    parts = [draw for cut in cuts for draw in in_parts.take(cut)]
    assert indices(parts) == indices(at_once.take(sum(cuts)))


def test_one_take_crosses_as_many_epochs_as_it_needs():
    draws = indices(ShuffledStream(prompts(3), seed=0).take(8))
    assert sorted(draws[:3]) == sorted(draws[3:6]) == [0, 1, 2]
    assert len(draws) == 8


@pytest.mark.parametrize("position", [0, 3, 4, 5, 8, 11])
def test_a_resumed_stream_goes_on_with_the_same_draws_at_an_epoch_boundary_too(position):
    items = prompts(4)
    whole = ShuffledStream(items, seed=1)
    whole.take(position)
    resumed = ShuffledStream(items, seed=1)
    resumed.load_state_dict(whole.state_dict())

    draws = resumed.take(6)

    assert len(draws) == 6
    assert draws == whole.take(6)


def test_the_state_is_the_position():
    stream = ShuffledStream(prompts(4), seed=1)
    stream.take(7)
    assert stream.state_dict() == {"position": 7}


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one item, but it got none"):
        ShuffledStream([], seed=0)
