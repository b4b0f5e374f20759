"""GiGPO: turns that follow the same text of the environment are compared with each other."""

import itertools
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from raypo.types import Experience
from tests.unit.ppo import oracle
from tests.unit.ppo.steps import NAN, estimate, experience, few, seeds

GAMMA = 0.9


def rows(seed: int, count: int = 8) -> dict[str, Tensor]:
    """Episodes of one to three turns with one of two observations between them, none at times."""
    generator = torch.Generator().manual_seed(seed)

    def below(bound: int) -> int:
        return int(torch.randint(0, bound, (1,), generator=generator))

    width = 16
    ids, turns = torch.zeros(count, width).long(), torch.full((count, width), -1)
    earned = torch.zeros(count, width, dtype=torch.float64)
    for row in range(count):
        at = 0
        for turn in range(1 + below(3)):
            text = [[7, 8], [9], []][below(3)] if turn else []
            ids[row, at : at + len(text)] = torch.tensor(text).long()
            at += len(text)
            num_tokens = 1 + below(2)
            turns[row, at : at + num_tokens] = turn
            ids[row, at : at + num_tokens] = 1 + below(5)
            at += num_tokens
            earned[row, at - 1] = below(3)
    extra = torch.randint(0, 2, (count,), generator=generator).double()
    return {
        "response_ids": ids,
        "turn_index": turns,
        "turn_rewards": earned,
        "scores": earned.sum(1) + extra,
        "group_index": torch.arange(count) // 4,
    }


def advantages(data: dict[str, Tensor], **more: Any) -> Tensor:
    given: dict[str, Any] = {k: v for k, v in data.items() if k != "scores"} | more
    mask = data["turn_index"] >= 0
    return estimate(data["scores"], mask, kind="gigpo", gamma=GAMMA, **given)[0]


def expected(data: dict[str, Tensor]) -> list[list[float]]:
    """The same by loops over turns."""
    ids, turns = data["response_ids"].tolist(), data["turn_index"].tolist()
    scores, group = data["scores"].tolist(), data["group_index"].tolist()
    alive = [i for i in range(len(scores)) if not math.isnan(scores[i])]
    steps: list[tuple[int, list[int], tuple[Any, ...], float]] = []
    for i in alive:
        places = [t for t, turn in enumerate(turns[i]) if turn >= 0]
        of_turns = [
            list(each) for _, each in itertools.groupby(places, key=lambda t, i=i: turns[i][t])
        ]
        earned = [sum(data["turn_rewards"][i, t].item() for t in each) for each in of_turns]
        earned[-1] += scores[i] - sum(earned)
        for number, each in enumerate(of_turns):
            before = of_turns[number - 1][-1] + 1 if number else 0
            state = (group[i], "prompt" if each[0] == 0 else "text", *ids[i][before : each[0]])
            rest = sum(GAMMA**age * reward for age, reward in enumerate(earned[number:]))
            steps.append((i, each, state, rest))
    found = [[0.0] * len(row) for row in ids]
    for place, (i, tokens, state, _) in enumerate(steps):
        mates = [n for n, other in enumerate(steps) if other[2] == state]
        of_turn = oracle.compare(mates.index(place), [steps[n][3] for n in mates], "grpo")
        others = [j for j in alive if group[j] == group[i]]
        of_episode = oracle.compare(others.index(i), [scores[j] for j in others], "grpo")
        for t in tokens:
            found[i][t] = of_episode + of_turn
    return found


@given(seed=seeds, failed=st.booleans())
@few
def test_turns_against_plain_loops_in_any_order_and_padding(seed, failed):
    data = rows(seed)
    if failed:
        data["scores"][2] = NAN
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))

    found = advantages(data)

    torch.testing.assert_close(found, torch.tensor(expected(data), dtype=torch.float64))
    shuffled = advantages({name: each[order] for name, each in data.items()})
    torch.testing.assert_close(shuffled, found[order])
    wide = {
        name: torch.nn.functional.pad(each, (0, 3), value=-1 if name == "turn_index" else 0)
        if each.dim() == 2
        else each
        for name, each in data.items()
    }
    torch.testing.assert_close(advantages(wide)[:, :-3], found)


def test_a_state_that_no_other_turn_had_adds_nothing():
    data = rows(0, count=2)
    data["response_ids"] = torch.tensor([[1, 7, 2], [3, 8, 4]])
    data["turn_index"] = torch.tensor([[0, -1, 1], [0, -1, 1]])
    data["turn_rewards"] = torch.zeros(2, 3).double()
    data["scores"] = torch.tensor([1.0, 0.0]).double()
    half = 0.5**0.5

    found = advantages(data)

    # the first turns have one state, the prompt; the second ones have their episode's advantage
    expected = [[2 * half, 0.0, half], [-2 * half, 0.0, -half]]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)
    data["group_index"] = torch.tensor([0, 1])  # one sample in each group
    assert advantages(data).abs().sum() == 0.0


def test_equal_returns_are_exactly_zero():
    data = rows(2)
    data["turn_rewards"] = torch.zeros_like(data["turn_rewards"])
    data["scores"] = torch.zeros(8).double()

    assert advantages(data).abs().sum() == 0.0


def test_prompts_that_differ_are_different_states():
    """The rows of a group have one prompt, unless an episode starts anew from another one."""
    ids = torch.tensor([[1], [2]])
    scores, group = torch.tensor([0.0, 1.0]), torch.zeros(2).long()
    mask = torch.ones(2, 1, dtype=torch.bool)

    def of(prompts: list[list[int]]) -> Tensor:
        more: dict[str, Any] = {"prompt_ids": torch.tensor(prompts), "response_ids": ids}
        assert isinstance(experience(mask, **more), Experience)
        return estimate(scores, mask, kind="gigpo", gamma=1.0, group_index=group, **more)[0]

    torch.testing.assert_close(of([[5], [5]]), 2 * of([[5], [6]]))
