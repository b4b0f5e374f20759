"""A step is filled round by round; every sample is accounted for, on every worker alike."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from raypo.config import FilterSection, RewardSection
from raypo.data.stream import ShuffledStream
from raypo.rewards.scoring import RewardError
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.step_batch import StepBatch
from raypo.types import Prompt, Rollout
from tests.rollouts import plain_rollout

LENIENT = RewardSection(max_failed_fraction=1.0)
ALIKE, VARIED = (1.0, 1.0), (0.0, 1.0)


def rollout(group: int, sample: int, tokens: int = 3) -> Rollout:
    return plain_rollout(
        prompt="p",
        response="r",
        num_response=tokens,
        prompt_ids=np.array([5], np.int32),
        response_ids=np.full(tokens, 6, np.int32),
        sample_index=sample,
        group_index=group,
    )


def prompts() -> ShuffledStream[Prompt]:
    return ShuffledStream([Prompt(i, "p", np.array([5], np.int32)) for i in range(3)], seed=0)


def fill(
    scores_of: Callable[[int], tuple[float, ...]],
    *,
    section: FilterSection,
    prompts_per_step: int = 4,
    stream: ShuffledStream[Prompt] | None = None,
    reward: RewardSection = LENIENT,
) -> StepBatch:
    source = PromptSource(stream or prompts(), 2)

    def scored_rollouts(count: int) -> list[Rollout]:
        return [
            replace(rollout(draw.group_index, sample), score=score)
            for draw in source.draw(count)
            for sample, score in enumerate(scores_of(draw.group_index))
        ]

    batch = StepBatch(missing_groups=prompts_per_step, filter=section, reward=reward)
    while batch.num_wanted:
        batch.add(scored_rollouts(batch.num_wanted))
    return batch


def fates(collected: StepBatch) -> tuple[float, ...]:
    names = ("sampled", "trained", "filtered", "failed")
    return tuple(collected.metrics[f"rollout/samples_{name}"] for name in names)


def groups(collected: StepBatch) -> list[int]:
    return sorted({each.group_index for each in collected.trained})


ON = FilterSection(enabled=True)


def test_without_a_filter_there_is_one_round_and_all_of_it_is_trained():
    collected = fill(lambda group: ALIKE, section=FilterSection())
    assert fates(collected) == (8, 8, 0, 0)
    assert collected.missing_groups == 0
    assert "rollout/refills" not in collected.metrics


def test_filtered_groups_are_replaced_by_the_next_draws_until_the_step_is_full():
    # draws 0, 3, 6 and 9 pass: rounds of 4, 2, 2, 1 and 1 draws
    stream = prompts()
    outcome = fill(lambda group: VARIED if group % 3 == 0 else ALIKE, section=ON, stream=stream)
    assert groups(outcome) == [0, 3, 6, 9]
    assert fates(outcome) == (20, 8, 12, 0)
    assert outcome.missing_groups == 0
    assert outcome.metrics["rollout/refills"] == 4
    assert stream.state_dict() == {"position": 10}  # the cursor: a resumed run goes on here


def test_the_last_refill_leaves_a_smaller_step():
    collected = fill(
        lambda group: VARIED if group == 0 else ALIKE,
        section=FilterSection(enabled=True, max_refills=2),
    )
    assert fates(collected) == (20, 2, 18, 0)
    assert collected.missing_groups == collected.metrics["rollout/groups_missing"] == 3


def test_a_step_may_lose_all_its_groups():
    collected = fill(lambda group: ALIKE, section=FilterSection(enabled=True, max_refills=0))
    assert fates(collected) == (8, 0, 8, 0)
    assert collected.trained == []


def test_the_range_of_means_and_the_least_deviation():
    scores = {0: (0.0, 0.0, 1.0), 1: (0.0, 1.0, 1.0), 2: (0.49, 0.5, 0.51), 3: (0.2, 0.5, 0.8)}
    for section, kept in (
        (FilterSection(enabled=True, low=0.4, max_refills=0), [1, 2, 3]),
        (FilterSection(enabled=True, high=0.6, max_refills=0), [0, 2, 3]),
        (FilterSection(enabled=True, min_std=0.1, max_refills=0), [0, 1, 3]),
    ):
        assert groups(fill(scores.__getitem__, section=section)) == kept


def test_failed_samples_are_failed_whatever_became_of_their_group():
    scores = {0: (math.nan, 0.0, 1.0), 1: (math.nan, 1.0, 1.0), 2: VARIED, 3: VARIED}
    collected = fill(scores.__getitem__, section=FilterSection(enabled=True, max_refills=0))
    assert fates(collected) == (10, 6, 2, 2)


def test_too_many_failures_stop_the_run():
    def scores_of(group: int) -> tuple[float, ...]:
        return (math.nan, math.nan) if group == 1 else VARIED

    strict = RewardSection(max_failed_fraction=0.2)
    with pytest.raises(RewardError, match=r"reward.max_failed_fraction \(0.2\): .* 2 of 8"):
        fill(scores_of, section=ON, reward=strict)
    assert fates(fill(scores_of, section=FilterSection())) == (8, 6, 0, 2)


def test_a_response_without_a_sampled_token_cannot_be_trained():
    scored = [replace(rollout(0, n, tokens), score=1.0) for n, tokens in ((0, 0), (1, 2))]
    batch = StepBatch(missing_groups=1, filter=FilterSection(), reward=LENIENT)
    batch.add(scored)
    assert not batch.num_wanted
    collected = batch
    assert collected.trained == scored[1:]
    assert fates(collected) == (2, 1, 0, 1)
    assert collected.metrics["rollout/samples_empty"] == 1
