"""Batches of a round are the same on any number of workers."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypo.collectives import Workers
from raypo.config import IterativeDPOConfig, RejectionSamplingConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.preference_tasks import PreferenceTask
from raypo.recipes.iterative_dpo import IterativeDPORecipe
from raypo.recipes.rounds import RoundsRecipe, SampleKey
from raypo.run.supervised_learner import even_shares, lengths
from raypo.types import Example, Pair
from tests.unit.learner.plain import on_workers
from tests.unit.run.test_rejection_sampling import VALUES

LEARNER = {"batch_size": 4, "num_epochs": 2}
CONFIG = RejectionSamplingConfig.parse(VALUES | {"learner": LEARNER})
ITEMS: dict[SampleKey, Example] = {
    (group, number): Example(
        np.full(1 + group % 3, group, np.int32), np.full(1 + (5 * group) % 7, number, np.int32)
    )
    for group in range(7)
    for number in range(2)
}
STEP = 3


def written(items: list[Example]) -> list[tuple[list[int], list[int]]]:
    return [(item.prompt_ids.tolist(), item.response_ids.tolist()) for item in items]


def trained(workers: Workers) -> list[Any]:
    """What each update of one worker is given."""
    updates: list[Any] = []

    def update(items: list[Example], *, step: int) -> dict[str, float]:
        assert step == STEP
        updates.append(written(items))
        return {}

    recipe: Any = SimpleNamespace(
        run=SimpleNamespace(config=CONFIG, workers=workers), prepare_items=lambda mine, *_: mine
    )
    selected = {} if workers.rank else ITEMS
    learner: Any = SimpleNamespace(update=update, data=workers)
    metrics = RoundsRecipe.train(recipe, learner, selected, STEP)
    assert metrics == {"train/updates": 8.0}
    return updates


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_update_has_the_same_items_on_any_number_of_workers(count: int):
    items = [ITEMS[place] for place in sorted(ITEMS)]
    for rank, updates in enumerate(on_workers(count, trained)):
        expected = []
        for epoch in range(2):
            order = minibatch_order(CONFIG.seed, STEP, epoch, len(items))
            for first in range(0, len(items), 4):
                batch = [items[each] for each in order[first : first + 4]]
                share = even_shares([lengths(item) for item in batch], count)[rank]
                expected.append(written([batch[each] for each in share]))
        assert updates == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_worker_asks_the_round_s_reference_about_its_share_of_the_pairs(count: int):
    pairs = {
        place: Pair(item.prompt_ids, item.response_ids, item.response_ids[:1])
        for place, item in ITEMS.items()
    }
    asked_of: list[int] = []

    def prepared(workers: Workers) -> dict[SampleKey, Pair]:
        def asked(some: list[Pair], _: Any) -> list[tuple[float, float]]:
            asked_of.append(len(some))
            return [(float(len(each.chosen_ids)), float(each.prompt_ids[0])) for each in some]

        config = IterativeDPOConfig.parse(VALUES)
        recipe: Any = IterativeDPORecipe.__new__(IterativeDPORecipe)
        recipe.run = SimpleNamespace(config=config, workers=workers)
        task = PreferenceTask.__new__(PreferenceTask)
        learner: Any = SimpleNamespace(task=task, asked=asked, data=workers)
        recipe.services = SimpleNamespace(reference=None)
        return dict(recipe.prepare_items({} if workers.rank else pairs, learner))

    whole, *others = on_workers(count, prepared)
    assert whole.keys() == pairs.keys()
    assert not any(others)
    assert sum(asked_of) == len(pairs)
    assert max(asked_of) - min(asked_of) <= 1
    for place, pair in whole.items():
        assert pair.ref_log_probs == (float(len(pairs[place].chosen_ids)), float(place[0]))
