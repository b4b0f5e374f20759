import numpy as np
import pytest

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
