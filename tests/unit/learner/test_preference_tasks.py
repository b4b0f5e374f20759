"""What dpo learns: losses by hand, whatever the cut, the order and the number of workers."""

import math
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from raypo.collectives import Workers
from raypo.config import DPOSection, ExamplesLearnerSection
from raypo.learner import supervised
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.types import Pair, Verdict
from tests.unit.learner.plain import VOCABULARY, PlainModel, on_workers, tiny_llama

ROWS = 7


def ids(generator, least: int = 1) -> np.ndarray:
    return generator.integers(0, VOCABULARY, generator.integers(least, 6)).astype(np.int32)


def pairs() -> list[Pair]:
    generator = np.random.default_rng(0)
    prompts = [ids(generator) for _ in range(3)]
    return [
        Pair(
            prompts[row % 3],
            ids(generator),
            ids(generator),
            margin=0.1 * row,
            ref_log_probs=(float(-generator.uniform(1, 9)), float(-generator.uniform(1, 9))),
        )
        for row in range(ROWS)
    ]


def verdicts() -> list[Verdict]:
    return [
        Verdict(
            pair.prompt_ids, pair.chosen_ids, row % 3 > 0, pair.rejected_ids, pair.ref_log_probs
        )
        for row, pair in enumerate(pairs())
    ]


def task_of(**dpo: Any) -> PreferenceTask | VerdictTask:
    section = DPOSection.model_validate(dpo)
    kind = VerdictTask if section.loss == "kto" else PreferenceTask
    return kind(deepcopy(tiny_llama()), section)


@contextmanager
def plain():
    with patch.object(supervised, "TrainedModel", PlainModel):
        yield


def learner_of(task: Any, workers: Workers, tokens: int = 10_000) -> SupervisedLearner[Any]:
    section = ExamplesLearnerSection(lr=0.01, max_tokens_per_microbatch=tokens)
    return SupervisedLearner(task, section, dtype="float32", num_steps=2, workers=workers)


def updated(items, workers: Workers, tokens: int, dpo: dict[str, Any]):
    learner: Any = learner_of(task_of(**dpo), workers, tokens)
    figures = learner.update(items[workers.rank :: workers.count], step=1)
    return figures, learner.evaluate(items[workers.rank :: workers.count]), learner._model.gradients


KINDS: list[dict[str, Any]] = [
    {"loss": "sigmoid", "label_smoothing": 0.1, "sft_coef": 0.5},
    {"loss": "sigmoid_norm"},
    {"loss": "robust", "label_smoothing": 0.1},
    {"loss": "hinge"},
    {"loss": "ipo"},
    {"loss": "simpo", "beta": 2.0},
    {"loss": "kto", "undesirable_weight": 1.5},
]


@pytest.mark.parametrize("dpo", KINDS, ids=lambda dpo: dpo["loss"])
def test_a_step_does_not_depend_on_workers_or_microbatches(dpo):
    items = verdicts() if dpo["loss"] == "kto" else pairs()
    with plain():
        ((figures, held_out, gradients),) = on_workers(1, lambda w: updated(items, w, 10_000, dpo))
        for count, tokens in ((1, 20), (2, 10_000), (3, 20)):
            others = on_workers(count, lambda w, tokens=tokens: updated(items, w, tokens, dpo))
            for other in others:
                assert other[0] == pytest.approx(figures, rel=1e-6, abs=1e-7)
                assert other[1] == pytest.approx(held_out, rel=1e-6, abs=1e-7)
                # Llama's norms are float32 even here.
                torch.testing.assert_close(other[2], gradients, rtol=1e-5, atol=1e-6)


def log_prob(model, prompt, response) -> float:
    """By a plain pass over one row."""
    row = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    table = model(row).logits[0].log_softmax(-1)
    places = range(len(prompt) - 1, row.shape[1] - 1)
    return math.fsum(float(table[at, row[0, at + 1]]) for at in places)


@torch.no_grad()
def test_the_loss_and_its_figures_by_hand():
    task, items = task_of(sft_coef=0.5, beta=0.3), pairs()
    model = task.network.double()
    total, sums = task.loss(task.module, items, "cpu")  # type: ignore[arg-type]
    loss = 0.0
    gaps = []
    for pair in items:
        assert pair.ref_log_probs
        chosen = log_prob(model, pair.prompt_ids, pair.chosen_ids)
        rejected = log_prob(model, pair.prompt_ids, pair.rejected_ids)
        gap = 0.3 * (chosen - pair.ref_log_probs[0] - rejected + pair.ref_log_probs[1])
        gaps.append(gap)
        loss += math.log1p(math.exp(-(gap - pair.margin))) - 0.5 * chosen / len(pair.chosen_ids)
    assert float(total) == pytest.approx(loss, rel=1e-5)
    assert sums["margin_mean"] == (pytest.approx(sum(gaps), rel=1e-4), ROWS)
    assert sums["accuracy"] == (sum(gap > 0 for gap in gaps), ROWS)
    better, worse = sums["chosen_reward_mean"][0], sums["rejected_reward_mean"][0]
    assert float(better) - float(worse) == pytest.approx(sum(gaps), rel=1e-4)
    assert sums["chosen_tokens_mean"] == (sum(len(pair.chosen_ids) for pair in items), ROWS)


@torch.no_grad()
def test_only_a_loss_without_a_reference_goes_without_one():
    nobody = [replace(pair, ref_log_probs=None) for pair in pairs()]
    task = task_of(loss="simpo", beta=2.0)
    model = task.network.double()
    _, sums = task.loss(task.module, nobody, "cpu")  # type: ignore[arg-type]
    by_hand = [
        2.0 * log_prob(model, p.prompt_ids, p.chosen_ids) / len(p.chosen_ids) for p in nobody
    ]
    assert sums["chosen_reward_mean"][0] == pytest.approx(sum(by_hand), rel=1e-5)
    for loss in ("sigmoid", "kto"):
        task = task_of(loss=loss)
        items = (
            [replace(each, ref_log_probs=None) for each in verdicts()] if loss == "kto" else nobody
        )
        with pytest.raises(AssertionError):
            task.loss(task.module, items, "cpu")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="and others have"):
        task_of().loss(task.module, [*nobody, *pairs()], "cpu")  # type: ignore[arg-type]


@torch.no_grad()
def test_kto_takes_its_reference_point_from_the_whole_batch():
    task, items = task_of(loss="kto"), verdicts()
    model = task.network.double()
    task.before_losses(task.module, [items[:3], items[3:]], Workers(), "cpu")  # type: ignore[arg-type]
    _, sums = task.loss(task.module, items, "cpu")  # type: ignore[arg-type]
    ratios = [
        log_prob(model, item.prompt_ids, item.other_ids) - (item.ref_log_probs or (0, 0))[1]
        for item in items
    ]
    assert float(sums["kl"][0]) / float(sums["kl"][1]) == pytest.approx(
        max(0.0, sum(ratios) / ROWS), rel=1e-5
    )
    counts = [sums[f"{which}_reward_mean"][1] for which in ("chosen", "rejected")]
    assert sum(map(float, counts)) == ROWS


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_what_the_reference_says_is_asked_in_any_cut_and_makes_the_first_margin_zero(loss):
    task, items = task_of(loss=loss), verdicts() if loss == "kto" else pairs()
    with plain():
        learner = learner_of(task, Workers(), tokens=20)
        asked = learner.without_adapter(items, task.log_probs)  # type: ignore[arg-type]
    known: list[Any] = [
        replace(item, ref_log_probs=each) for item, each in zip(items, asked, strict=True)
    ]
    task.before_losses(task.module, [known], Workers(), "cpu")
    _, sums = task.loss(task.module, known, "cpu")
    rewards = [sums[f"{name}_reward_mean"][0] for name in ("chosen", "rejected")]
    assert rewards == pytest.approx([0.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_the_blank_preference_is_a_legal_pass(loss):
    task = task_of(loss=loss)
    total, _ = task.loss(task.module, [task.blank], "cpu")  # type: ignore[list-item]
    assert math.isfinite(float(total.detach()))
