"""Whether the first trial of a sweep is better than the next one by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from raypo.report.change import lead_words
from raypo.report.page import number
from raypo.tuning.gaming import REWARD_MODEL, SCORE, Scores
from raypo.tuning.goal import Goal
from raypo.tuning.record import TrialRecord
from raypo.tuning.view import point_text

WORDS = {
    SCORE: "held-out score",
    REWARD_MODEL: "reward model's score, held out",
    "kl/ref_response_mean": "KL to the reference, nats per response",
    "rollout/score_mean": "training score",
}


def who_is_best(
    trials: Sequence[TrialRecord], goal: Goal, held_out: Callable[[TrialRecord], Scores]
) -> str:
    """A sentence on the first trial and the next one whose score is of the same step.

    Args:
        trials: Best first; those without a score are passed over.
        held_out: Gives a trial's held-out scores by prompt, those that its score is the mean of.
    """
    trials = [trial for trial in trials if math.isfinite(goal.gains(trial.judged)[0])]
    best, metric = trials[0], goal.metrics[0]
    label, name = WORDS.get(metric, metric), point_text(best.point)
    score = f"{label} {number(best.metrics[metric])} at step {best.scored_step}"
    if len(goal.metrics) > 1:
        count = len(goal.front([trial.judged for trial in trials]))
        others = (
            f"; {count} trials are on the Pareto front, which no other one beats in all metrics"
        )
        return f"{name} is first by {label}: {score}{others if count > 1 else ''}."
    peers = [
        trial
        for trial in trials[1:]
        if trial.scored_step == best.scored_step
        and goal.is_feasible(trial.metrics) == goal.is_feasible(best.metrics)
    ]
    if not peers:
        alone = "; no other trial has such a score of that step" if len(trials) > 1 else ""
        return f"{name} is first: {score}{alone}."
    second = peers[0]
    other = point_text(second.point)
    if metric == SCORE:
        scores = {name: held_out(best), other: held_out(second)}
        if len(scores) > 1 and scores[name] and scores[name].keys() == scores[other].keys():
            return f"{lead_words(scores, label=label)} Both are of step {best.scored_step}."
    next_one = f"Next is {other} with {number(second.metrics[metric])}"
    return f"{name} is first: {score}. {next_one}; how much of that is chance is not known."
