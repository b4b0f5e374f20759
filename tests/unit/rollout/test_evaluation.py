"""Held-out scores by hand: means, failures, pass@k."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np

from raypo.config import EngineSection, EvalSection
from raypo.config.rollout_section import RolloutSection
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.collect import Sampler, Sampling, request_of
from raypo.rollout.evaluation import _of_evaluation, evaluate_policy
from raypo.types import Prompt, Rollout
from tests.stand_ins import Engine, Lossy
from tests.unit.test_known_bugs import ALIKE, SAMPLING

PROMPTS = [Prompt(index, "p", np.array([5], np.int32)) for index in range(3)]
SCORES = {0: (1.0, 0.0), 1: (math.nan, 2.0), 2: (0.5, 0.9)}
"""By prompt, of its two samples; NaN where scoring failed."""


def known_scores(rollouts: list[Rollout]) -> list[float]:
    return [SCORES[each.prompt_index][each.sample_index] for each in rollouts]


def test_means_failures_and_pass_at_k_by_hand():
    section = EvalSection(samples_per_prompt=2, pass_at=(1, 2))

    figures, _ = evaluate_policy(
        PROMPTS, Sampler(ALIKE, Lossy(), SAMPLING), known_scores, section=section,
    )  # fmt: skip

    assert figures == {
        "eval/failed": 1.0,
        "eval/pass_at_1": (1 / 2 + 1 + 0) / 3,  # a score of 1 passes, a failed sample has no score
        "eval/pass_at_2": (1 + 0) / 2,  # prompt 1 has one score only
        "eval/response_tokens_mean": 3.0,
        "eval/score_mean": (1.0 + 0.0 + 2.0 + 0.5 + 0.9) / 5,
    }


def pass_at(k: int, function: RewardFunction) -> float:
    section = EvalSection(samples_per_prompt=2, pass_at=(k,))
    figures, _ = evaluate_policy(
        PROMPTS, Sampler(ALIKE, Lossy(), SAMPLING), function, section=section
    )
    return figures[f"eval/pass_at_{k}"]


def test_a_score_just_below_1_does_not_pass():
    assert pass_at(1, lambda rollouts: [1 - 1e-9] * len(rollouts)) == 0.0


def test_pass_at_k_without_a_prompt_of_k_scores_is_not_known():
    assert math.isnan(pass_at(2, lambda rollouts: [1.0, math.nan] * 3))


def test_scores_by_source_where_there_are_several():
    def by_source(*sources: str) -> dict[str, float]:
        prompts = [replace(p, data_source=s) for p, s in zip(PROMPTS, sources, strict=True)]
        figures, _ = evaluate_policy(
            prompts, Sampler(ALIKE, Lossy(), SAMPLING), known_scores,
            section=EvalSection(samples_per_prompt=2),
        )  # fmt: skip
        return {k: v for k, v in figures.items() if k.startswith("eval/score_mean/")}

    assert by_source("a", "b", "a") == {
        "eval/score_mean/a": (1.0 + 0.0 + 0.5 + 0.9) / 4,
        "eval/score_mean/b": 2.0,
    }
    assert by_source("a", "a", "a") == {}, "it would be eval/score_mean once more"


def test_only_training_samples_may_take_the_engines_random_state():
    def seed_of(seeds: Literal["request", "engine"], *, held_out: bool = False) -> int | None:
        section = RolloutSection(engine=EngineSection(seeds=seeds))
        sampling = Sampling.of(section, stop_token_ids=(), seed=7)
        if held_out:
            sampling = _of_evaluation(EvalSection(), sampling)
        return request_of(replace(PROMPTS[0], group_index=0), 0, sampling).seed

    assert seed_of("engine") is None
    assert seed_of("request") is not None
    assert seed_of("engine", held_out=True) == seed_of("request", held_out=True) is not None


def test_an_evaluation_samples_once():
    asked: list[int] = []
    engine = Engine(lambda requests: asked.append(len(requests)) or ALIKE.answers(requests))

    evaluate_policy(
        PROMPTS, Sampler(engine, Lossy(), SAMPLING), known_scores,
        section=EvalSection(samples_per_prompt=2),
    )  # fmt: skip

    assert asked == [6]


def test_an_evaluation_shares_no_keys_with_training():
    """A run that goes on trains next, where an undisturbed one has evaluated before."""
    salts: set[str] = set()
    engine = Engine(
        lambda requests: salts.update(r.cache_salt for r in requests) or ALIKE.answers(requests)
    )
    evaluate_policy(
        PROMPTS, Sampler(engine, Lossy(), SAMPLING), known_scores,
        section=EvalSection(samples_per_prompt=2),
    )  # fmt: skip
    draw = replace(PROMPTS[0], group_index=0)
    assert len(salts) == 1
    assert request_of(draw, 0, SAMPLING).cache_salt == ""
    assert "" not in salts
