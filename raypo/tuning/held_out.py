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

HeldOutChanges = Mapping[str, Change]
"""Changes of the held-out score (key SCORE) and of the reward-model score (key REWARD_MODEL) on the
held-out prompts. An unknown change has no entry."""


def best_trial_text(trials: Sequence[TrialRecord], goal: Goal, files: RunFiles) -> str:
    """Describe the best trial and its lead over the next trial with a score of the same step.

    Args:
        trials: Trials, best first. At least one has a score; trials without a score are skipped.
        goal: Objective of the sweep.
        files: The sweep's folder.
    """
    trials = [trial for trial in trials if math.isfinite(goal.gains(trial.judged)[0])]
    best, metric = trials[0], goal.metrics[0]
    label, name = label_of(metric), point_text(best.point)
    score = f"{label} {number(best.metrics[metric])} at step {best.scored_step}"
    if len(goal.metrics) > 1:
        count = len(goal.front([trial.judged for trial in trials]))
        front_text = (
            f"; {count} trials are on the Pareto front: no other trial beats them in all metrics"
        )
        return f"{name} is first by {label}: {score}{front_text if count > 1 else ''}."
    peers = [
        trial
        for trial in trials[1:]
        if trial.scored_step == best.scored_step
        and bool(goal.broken(trial.metrics)) == bool(goal.broken(best.metrics))
    ]
    if not peers:
        remark = "; no other trial has a comparable score at that step" if len(trials) > 1 else ""
        return f"{name} is first: {score}{remark}."
    second = peers[0]
    second_name = point_text(second.point)
    if metric == SCORE:
        scores = {
            text: held_out_scores(trial_files(files, trial.name), trial.scored_step)
            for text, trial in ((name, best), (second_name, second))
        }
        if len(scores) > 1 and scores[name] and scores[name].keys() == scores[second_name].keys():
            return (
                f"{lead_words(scores, label=label)} Both scores are from step {best.scored_step}."
            )
    second_text = f"Next is {second_name} with {number(second.metrics[metric])}"
    return f"{name} is first: {score}. {second_text}; the difference may be due to chance."


def held_out_changes(files: RunFiles, step: int) -> dict[str, Change]:
    """Return the paired changes of a trial's held-out and reward-model scores up to a step."""
    changes: dict[str, Change] = {}
    score_change = held_out_change(files, step)
    if score_change is None:
        return changes
    first_step, last_step, changes[SCORE] = score_change
    weights = model_weights(files.config() or {})
    reward_model_change = paired_change(
        *(model_scores(files, endpoint, weights) for endpoint in (first_step, last_step))
    )
    return changes | ({REWARD_MODEL: reward_model_change} if reward_model_change else {})


def model_scores(files: RunFiles, step: int, weights: Mapping[str, float]) -> dict[Any, float]:
    """Return the mean reward-model score of each held-out prompt (`eval/reward_model_mean`)."""
    columns = ("group_index", "prompt", "scores_by_source", "row_index")
    rows = files.rollouts(step, held_out=True, columns=columns)
    return scores_by_prompt({**row, "score": _model_score(row, weights)} for row in rows)


def _model_score(row: Mapping[str, Any], weights: Mapping[str, float]) -> float | None:
    score_by_source = dict(row["scores_by_source"] or ())
    if not weights or any(score_by_source.get(name) is None for name in weights):
        return None
    return math.fsum(weight * score_by_source[name] for name, weight in weights.items())


def model_weights(config: Mapping[str, Any]) -> dict[str, float]:
    """Map each reward model in a run's config to its weight in the score."""
    entries = (config.get("model") or {}).get("reward") or ()
    default_weight = ((config.get("reward") or {}).get("weights") or {}).get("model", 1.0)
    names = ["model"] if len(entries) == 1 else [f"model_{index}" for index in range(len(entries))]
    return {
        name: default_weight * entry["weight"] for name, entry in zip(names, entries, strict=True)
    }


def gaming_text(trials: Sequence[TrialRecord], changes: Mapping[str, HeldOutChanges]) -> str:
    """Describe the trials that game the reward model, worst first. Empty if there are none.

    Args:
        trials: All trials.
        changes: Changes of both scores, by trial name.
    """
    pairs = [(trial, changes.get(trial.name, {})) for trial in trials]
    gaming_trials = [
        (trial, trial_changes)
        for trial, trial_changes in pairs
        if _games_reward_model(trial_changes)
    ]
    if not gaming_trials:
        return ""
    gaming_trials = sorted(
        gaming_trials, key=lambda pair: pair[1][SCORE].after - pair[1][SCORE].before
    )
    points = [point_text(trial.point) for trial, _ in gaming_trials]
    more_text = f" and {len(points) - MAX_NAMED} more" if len(points) > MAX_NAMED else ""
    worst, trial_changes = gaming_trials[0]
    verb = "game" if len(gaming_trials) > 1 else "games"
    model_change, score_change = trial_changes[REWARD_MODEL], trial_changes[SCORE]
    return (
        f"{', '.join(points[:MAX_NAMED])}{more_text} {verb} the reward model: in {worst.name} its "
        f"score went from {number(model_change.before)} to {number(model_change.after)} while the "
        f"held-out score fell from {score_change.before:.3f} to {score_change.after:.3f} by step "
        f"{worst.scored_step} ({score_change.words})."
    )


def _games_reward_model(change: HeldOutChanges) -> bool:
    """Return True if the reward-model score rose and the held-out score fell.

    Both changes must be significant.
    """
    if not {SCORE, REWARD_MODEL} <= change.keys():
        return False
    return change[REWARD_MODEL].direction == 1 and change[SCORE].direction == -1
