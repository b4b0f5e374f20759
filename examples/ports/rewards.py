"""Reward functions of verl's form, and of OpenRLHF's behind one of raypo's form."""

from __future__ import annotations

from typing import Any

from raypo import Rollout


def compute_score(
    data_source: str | None, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return float(solution_str == ground_truth)


def reward_func(queries: list[str], prompts: list[str], labels: list[Any]) -> list[float]:
    answers = (query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True))
    return [float(answer == label) for answer, label in zip(answers, labels, strict=True)]


def of_openrlhf(rollouts: list[Rollout]) -> list[float]:
    return reward_func(
        [each.prompt + each.response for each in rollouts],
        [each.prompt for each in rollouts],
        [each.label for each in rollouts],
    )
