"""Who trains what: a cut of the whole batch that knows nothing of workers."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raypo.data.stream import ShuffledStream
from raypo.learner.learner import minibatch_order
from raypo.rollout.sharding import balanced_shares, deal, to_experience
from raypo.run.rollout_metrics import rollout_metrics
from raypo.types import Prompt, Rollout
from tests.unit.rollout.test_step_batch import rollout


def scored(count: int) -> list[Rollout]:
    return [replace(rollout(n // 2, n % 2, 1 + n % 4), score=float(n)) for n in range(count)]


def dealt(
    batch: list[Rollout], num_workers: int = 1, size: int = 4, **more: Any
) -> list[list[Rollout]]:
    """The hand of each worker."""
    return deal(batch, minibatch_size=size, seed=(0, 1), num_workers=num_workers, **more)


def members(deals) -> dict[int, set[float]]:
    """Scores by minibatch, over all workers."""
    cut: dict[int, set[float]] = {}
    for each in deals:
        for one in each:
            cut.setdefault(one.minibatch, set()).add(one.score)
    return cut


@pytest.mark.parametrize("count", [2, 3])
def test_the_minibatches_do_not_depend_on_the_workers(count):
    batch = scored(12)
    alone = members(dealt(batch))
    deals = dealt(batch[::-1], count)

    assert members(deals) == alone
    assert [len(cut) for cut in alone.values()] == [4, 4, 4]
    for number in alone:
        assert all(number in {one.minibatch for one in each} for each in deals)


def test_conversations_of_one_group_with_other_prompts_are_dealt_one_by_one():
    """Each of them is read whole: none shares what another one reads."""
    batch = [
        replace(rollout(0, n, 2), prompt_ids=np.full(100, 4 + n, np.int32), score=0.0)
        for n in range(4)
    ]
    batch += [replace(rollout(1, n, 2), score=0.0) for n in range(4)]
    deals = dealt(batch, 2, size=8)
    read = [sum(len(one.prompt_ids) > 50 for one in each) for each in deals]
    assert read == [2, 2]


def test_each_team_is_dealt_the_whole_batch():
    batch, teams = scored(12), (range(2), range(2, 3))
    deals = dealt(batch, 3, teams=teams)
    assert members(deals[:2]) == members(deals[2:]) == members(dealt(batch))
    assert sum(map(len, deals)) == 2 * len(batch)


def test_samples_of_a_prompt_are_trained_together_by_one_worker():
    batch = [replace(rollout(n // 2, n % 2, 3), score=float(n)) for n in range(12)]
    for each in dealt(batch, 2):
        of_a_group = Counter((one.minibatch, one.group_index) for one in each)
        assert set(of_a_group.values()) == {2}


@pytest.mark.parametrize(
    ("responses", "sizes"), [(12, [4, 4, 4]), (9, [3, 3, 3]), (5, [3, 2]), (3, [3]), (0, [])]
)
def test_fewer_responses_than_planned_are_minibatches_of_like_size(responses, sizes):
    cut = members(dealt(scored(responses)))
    assert [len(cut[number]) for number in sorted(cut)] == sizes


def test_bug_9_a_worker_is_left_without_only_where_there_are_fewer_responses_than_workers():
    shares = balanced_shares([[0, 1, 2, 3, 4]], [3] * 5, [100, 1, 1, 1, 1], 2)
    assert sorted(map(sorted, shares)) == [[0], [1, 2, 3, 4]]
    assert balanced_shares([[0, 1]], [3, 3], [7, 7], 3) == [[0], [1], []]
    batches = [to_experience(hand) for hand in dealt(scored(2), 3)]
    assert sorted(len(batch) for batch in batches) == [0, 1, 1]


def test_long_groups_are_shared_out_and_short_ones_kept():
    whole = [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert balanced_shares(whole, [1] * 8, [10] * 8, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    shares = balanced_shares([[0, 1, 2, 3]], [1] * 4, [10] * 4, 2)
    assert sorted(map(sorted, shares)) == [[0, 1], [2, 3]]


def test_prompts_cut_and_minibatch_order_of_a_seed_share_no_permutation():
    count = 40
    prompts = [Prompt(n, "", np.array([n], np.int32)) for n in range(count)]
    stream = ShuffledStream(prompts, seed=0)
    drawn = [prompt.index for _, prompt in stream.take(2 * count)][count:]  # epoch 1
    batch = [replace(rollout(n, 0, 1), score=float(n)) for n in range(count)]
    (hand,) = dealt(batch, size=1)
    cut = [int(one.score) for one in hand]
    orders = [drawn, cut, minibatch_order(0, 1, 0, count)]

    assert [sorted(order) for order in orders] == [list(range(count))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_where_nothing_was_sampled_there_is_no_score():
    assert rollout_metrics([]) == {}
    assert rollout_metrics(scored(2))["rollout/score_mean"] == 0.5


def test_the_versions_of_tokens_are_those_of_the_rollouts():
    one = replace(rollout(0, 0, 3), weight_version=5, later_versions=((2, 6),))
    batch = to_experience([replace(each, score=0.0) for each in (one, rollout(4, 1, 2))])
    assert batch.weight_versions is not None
    assert batch.weight_versions.tolist() == [[5, 5, 6], [0, 0, 0]]


def test_what_an_environment_wrote_is_attended_to_and_neither_trained_nor_counted():
    mask = np.array([True, False, True])
    turns = replace(rollout(0, 0, 3), response_mask=mask, prompt_index=7, weight_version=5)
    shares = [
        replace(turns, score=1.0),
        replace(rollout(4, 1, 1), score=2.0, minibatch=1),
    ]

    batch = to_experience(shares)

    assert batch.response_mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.group_index.tolist() == [0, 4]
    assert batch.minibatch.tolist() == [0, 1]
    assert batch.weight_version.tolist() == [5, 0]
    assert batch.weight_versions is None, "no weights came while a response was sampled"
    figures = rollout_metrics(shares)
    assert figures["rollout/response_tokens"] == 3.0
    assert figures["rollout/response_tokens_mean"] == 1.5
    assert figures["rollout/response_tokens_max"] == 2.0
