"""Sentences about held-out scores: the best trial, and trials that game the reward model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raypo.metrics.catalogue import label_of
from raypo.report.change import (
    Change,
    held_out_change,
    held_out_scores,
    lead_words,
    paired_change,
    scores_by_prompt,
)
from raypo.report.page import number
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import REWARD_MODEL, SCORE, Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.sweep_folder import trial_files
from raypo.tuning.view import point_text

MAX_NAMED = 4
"""Maximum number of trials named in a sentence."""

Changes = Mapping[str, Change]
"""Changes of the held-out score (key SCORE) and of the reward-model score (key REWARD_MODEL) on the
held-out prompts. A change that is not known has no entry."""


def who_is_best(trials: Sequence[TrialRecord], goal: Goal, files: RunFiles) -> str:
    """Describe the best trial and its lead over the next trial with a score of the same step.

    Args:
        trials: Trials, best first; those without a score are skipped. At least one has a score.
        goal: Objective of the sweep.
        files: The sweep's folder.
    """
    trials = [trial for trial in trials if math.isfinite(goal.gains(trial.judged)[0])]
    best, metric = trials[0], goal.metrics[0]
    label, name = label_of(metric), point_text(best.point)
    score = f"{label} {number(best.metrics[metric])} at step {best.scored_step}"
    if len(goal.metrics) > 1:
        count = len(goal.front([trial.judged for trial in trials]))
        others = (
            f"; {count} trials are on the Pareto front: no other trial beats them in all metrics"
        )
        return f"{name} is first by {label}: {score}{others if count > 1 else ''}."
    peers = [
        trial
        for trial in trials[1:]
        if trial.scored_step == best.scored_step
        and bool(goal.broken(trial.metrics)) == bool(goal.broken(best.metrics))
    ]
    if not peers:
        alone = "; no other trial has a comparable score at that step" if len(trials) > 1 else ""
        return f"{name} is first: {score}{alone}."
    second = peers[0]
    other = point_text(second.point)
    if metric == SCORE:
        scores = {
            text: held_out_scores(trial_files(files, trial.name), trial.scored_step)
            for text, trial in ((name, best), (other, second))
        }
        if len(scores) > 1 and scores[name] and scores[name].keys() == scores[other].keys():
            return (
                f"{lead_words(scores, label=label)} Both scores are from step {best.scored_step}."
            )
    next_one = f"Next is {other} with {number(second.metrics[metric])}"
    return f"{name} is first: {score}. {next_one}; the difference may be due to chance."


def held_out_changes(files: RunFiles, step: int) -> dict[str, Change]:
    """Return the paired changes of a trial's held-out and reward-model scores up to a step."""
    changes: dict[str, Change] = {}
    score = held_out_change(files, step)
    if score is None:
        return changes
    first, last, changes[SCORE] = score
    weights = model_weights(files.config() or {})
    of_model = paired_change(*(model_scores(files, n, weights) for n in (first, last)))
    return changes | ({REWARD_MODEL: of_model} if of_model else {})


def model_scores(files: RunFiles, step: int, weights: Mapping[str, float]) -> dict[Any, float]:
    """Return the mean reward-model score of each held-out prompt (`eval/reward_model_mean`)."""
    columns = ("group_index", "prompt", "scores_by_source", "row_index")
    rows = files.rollouts(step, held_out=True, columns=columns)
    return scores_by_prompt({**row, "score": _model_score(row, weights)} for row in rows)


def _model_score(row: Mapping[str, Any], weights: Mapping[str, float]) -> float | None:
    by_source = dict(row["scores_by_source"] or ())
    if not weights or any(by_source.get(name) is None for name in weights):
        return None
    return math.fsum(weight * by_source[name] for name, weight in weights.items())


def model_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Map each reward model in a run's config to its weight in the score."""
    entries = (config.get("model") or {}).get("reward") or ()
    common = ((config.get("reward") or {}).get("weights") or {}).get("model", 1.0)
    names = ["model"] if len(entries) == 1 else [f"model_{n}" for n in range(len(entries))]
    return {name: common * entry["weight"] for name, entry in zip(names, entries, strict=True)}


def gaming_words(trials: Sequence[TrialRecord], changes: Mapping[str, Changes]) -> str:
    """Describe the trials that game the reward model, worst first. Empty if there are none.

    Args:
        trials: All trials.
        changes: Changes of both scores, by trial name.
    """
    pairs = [(trial, changes.get(trial.name, {})) for trial in trials]
    gamed = [(trial, change) for trial, change in pairs if _is_gamed(change)]
    if not gamed:
        return ""
    gamed = sorted(gamed, key=lambda pair: pair[1][SCORE].after - pair[1][SCORE].before)
    points = [point_text(trial.point) for trial, _ in gamed]
    more = f" and {len(points) - MAX_NAMED} more" if len(points) > MAX_NAMED else ""
    worst, change = gamed[0]
    verb = "game" if len(gamed) > 1 else "games"
    liked, score = change[REWARD_MODEL], change[SCORE]
    return (
        f"{', '.join(points[:MAX_NAMED])}{more} {verb} the reward model: in {worst.name} its "
        f"score went from {number(liked.before)} to {number(liked.after)} while the held-out "
        f"score fell from {score.before:.3f} to {score.after:.3f} by step {worst.scored_step} "
        f"({score.words})."
    )


def _is_gamed(change: Changes) -> bool:
    """Return True if the reward-model score rose and the held-out score fell.

    Both changes must be significant.
    """
    if not {SCORE, REWARD_MODEL} <= change.keys():
        return False
    return change[REWARD_MODEL].direction == 1 and change[SCORE].direction == -1
