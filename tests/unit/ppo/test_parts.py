"""GDPO: parts of the score, each normalised within its group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypo.collectives import Workers
from raypo.ppo.groups import parts_over_workers
from raypo.rollout.sharding import to_experience
from raypo.types import Experience
from tests.unit.learner.plain import group as group_of
from tests.unit.ppo import oracle
from tests.unit.ppo.steps import NAN, few, seeds

WEIGHTS = {"right": 1.0, "format": 0.5}


def compared(parts, group, valid=None, workers=None, **more):
    valid = torch.ones_like(group, dtype=torch.bool) if valid is None else valid
    return parts_over_workers(
        parts, group, valid, weights=WEIGHTS, workers=workers or Workers(), **more
    )


@given(seed=seeds, samples=st.integers(2, 4))
@few
def test_parts_against_plain_loops(seed, samples):
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * samples
    parts = torch.randint(0, 3, (rows, 2), generator=generator).double()
    parts[torch.rand(rows, 2, generator=generator) < 0.2] = NAN  # a part that is not given
    parts[0] = 1.0
    valid = torch.rand(rows, generator=generator) < 0.9
    valid[0] = True
    group = torch.arange(rows) // samples
    order = torch.randperm(rows, generator=generator)

    found = compared(parts[order], group[order], valid[order])

    alive = [i for i in range(rows) if valid[i]]
    expected = oracle.parts_apart(
        parts[alive].tolist(), group[alive].tolist(), weights=[*WEIGHTS.values()]
    )
    in_order = torch.zeros(rows, dtype=torch.float64)
    in_order[alive] = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found, in_order[order])


@pytest.mark.parametrize("value", [0.1, -3.0, 1e6 / 3])
def test_groups_without_spread_are_exactly_zero(value):
    parts, group = torch.full((6, 2), value), torch.arange(6) // 3

    assert compared(parts, group).tolist() == [0.0] * 6
    assert compared(parts, torch.arange(6)).tolist() == [0.0] * 6  # one sample in each group
    assert compared(parts[:0], group[:0]).tolist() == []


def test_rows_of_an_episode_count_once():
    parts = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    group, sample = torch.zeros(4).long(), torch.tensor([0, 0, 1, 2])

    found = compared(parts, group, sample_index=sample)

    once = compared(parts[1:], group[1:])
    torch.testing.assert_close(found, once[[0, 0, 1, 2]])


def test_a_part_that_no_response_has_is_refused():
    parts = torch.tensor([[1.0, NAN], [0.0, NAN]])

    with pytest.raises(ValueError, match=r"ppo.part_weights.format \(0.5\): no response"):
        compared(parts, torch.zeros(2).long())


def test_parts_come_from_the_reward_function_and_the_sources_of_the_score():
    batch = to_experience(scored := list(group_of(0)), parts=("right", "model"))

    assert batch.parts is not None
    assert batch.parts.tolist() == [pytest.approx([n, -n]) for n in range(len(scored))]
    picked = batch.select(torch.tensor([2, 0]))
    assert picked.parts is not None
    assert picked.parts.tolist() == [[2.0, -2.0], [0.0, 0.0]]
    assert to_experience(scored).parts is None
    empty = to_experience([], parts=("right", "model")).parts
    assert empty is not None
    assert empty.shape == (0, 2)
    assert isinstance(batch.blank(), Experience)
