"""Who trains what: a cut of the whole batch that knows nothing of workers."""

from dataclasses import replace

import numpy as np
import pytest

from raypo.collectives import Workers
from raypo.data.stream import PromptStream
from raypo.learner.learner import minibatch_order
from raypo.recipes.figures import rollout_figures
from raypo.rollout.dealing import Deal, balanced_shares, deal, to_experience
from raypo.types import Prompt, ScoredRollout
from tests.unit.learner.plain import on_workers
from tests.unit.rollout.test_refill import rollout


def scored(count: int) -> list[ScoredRollout]:
    return [ScoredRollout(rollout(n // 2, n % 2, 1 + n % 4), float(n), {}) for n in range(count)]


def members(deals) -> dict[int, set[float]]:
    """Scores by minibatch, over all workers."""
    cut: dict[int, set[float]] = {}
    for each in deals:
        for number, one in zip(each.minibatch, each.rollouts, strict=True):
            cut.setdefault(number, set()).add(one.score)
    return cut


@pytest.mark.parametrize("count", [2, 3])
def test_the_minibatches_do_not_depend_on_the_workers(count):
    batch = scored(12)
    alone = members([deal(batch, minibatch_size=4, seed=(0, 1), workers=Workers())])

    deals = on_workers(
        count,
        lambda w: deal(batch[w.rank :: w.count], minibatch_size=4, seed=(0, 1), workers=w),
    )

    assert members(deals) == alone
    assert [len(cut) for cut in alone.values()] == [4, 4, 4]
    for number in alone:
        sizes = [each.minibatch.count(number) for each in deals]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("responses", "sizes"), [(12, [4, 4, 4]), (9, [3, 3, 3]), (5, [3, 2]), (3, [3]), (0, [])]
)
def test_fewer_responses_than_planned_are_minibatches_of_like_size(responses, sizes):
    cut = members([deal(scored(responses), minibatch_size=4, seed=(0,), workers=Workers())])
    assert [len(cut[number]) for number in sorted(cut)] == sizes


def test_bug_9_a_worker_is_left_without_only_where_there_are_fewer_responses_than_workers():
    assert [len(share) for share in balanced_shares([100, 1, 1, 1, 1], 2)] == [2, 3]
    assert [len(share) for share in balanced_shares([7, 7], 3)] == [1, 1, 0]
    deals = on_workers(
        3, lambda w: deal(scored(2)[w.rank :: 3], minibatch_size=4, seed=(0,), workers=w)
    )
    batches = [to_experience(each) for each in deals]
    assert sorted(len(batch) for batch in batches) == [0, 1, 1]


def test_prompts_cut_and_minibatch_order_of_a_seed_share_no_permutation():
    count = 40
    prompts = [Prompt(n, "", np.array([n], np.int32)) for n in range(count)]
    stream = PromptStream(prompts, seed=0)
    drawn = [d.prompt.index for d in stream.take(2 * count)][count:]  # epoch 1
    dealt = deal(scored(count), minibatch_size=1, seed=(0, 1), workers=Workers())
    cut = [int(one.score) for one in dealt.rollouts]
    orders = [drawn, cut, minibatch_order(0, 1, 0, count)]

    assert [sorted(order) for order in orders] == [list(range(count))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_what_an_environment_wrote_is_attended_to_and_neither_trained_nor_counted():
    mask = np.array([True, False, True])
    turns = replace(rollout(0, 0, 3), response_mask=mask, prompt_index=7, weight_version=5)
    shares = [ScoredRollout(turns, 1.0, {}), ScoredRollout(rollout(4, 1, 1), 2.0, {})]

    batch = to_experience(Deal(shares, [0, 1]))

    assert batch.response_mask.tolist() == [[True, False, True], [True, False, False]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.group_index.tolist() == [0, 4]
    assert batch.weight_version.tolist() == [5, 0]
    figures = rollout_figures(shares, Workers())
    assert figures["rollout/response_tokens"] == 3.0
    assert figures["rollout/response_tokens_mean"] == 1.5
    assert figures["rollout/response_tokens_max"] == 2.0
