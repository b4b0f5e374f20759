"""Which trials game the reward model: its score rises while the held-out one falls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypo.metrics.report.page import number
from raypo.tuning.record import TrialRecord
from raypo.tuning.view import point_text

SCORE, REWARD_MODEL = "eval/score_mean", "eval/reward_model_mean"
MIN_LOSS = 0.02
"""Of the held-out score: less than this is chance."""
MAX_NAMED = 4
"""Trials in one sentence."""


def gaming_words(
    trials: Sequence[TrialRecord], starts: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """What to say of trials that both have judged; nothing where fewer than two are.

    Args:
        starts: By trial, its figures from before the first update.
    """
    judged = [trial for trial in trials if {SCORE, REWARD_MODEL} <= trial.metrics.keys()]
    if len(judged) < 2:
        return []
    pairs = [(trial, starts.get(trial.name, {})) for trial in judged]
    gamed = [(trial, start) for trial, start in pairs if _is_gamed(trial.metrics, start)]
    return list(filter(None, [_of_gamed(gamed), _of_favourite(judged, is_gamed=bool(gamed))]))


def _is_gamed(last: Mapping[str, float], start: Mapping[str, Any]) -> bool:
    if not {SCORE, REWARD_MODEL} <= start.keys():
        return False
    return last[REWARD_MODEL] > start[REWARD_MODEL] and last[SCORE] < start[SCORE] - MIN_LOSS


def _of_gamed(gamed: Sequence[tuple[TrialRecord, Mapping[str, Any]]]) -> str:
    """Trials whose policy got better for the one by getting worse for the other."""
    if not gamed:
        return ""
    gamed = sorted(gamed, key=lambda pair: pair[0].metrics[SCORE] - pair[1][SCORE])
    points = [point_text(trial.point) for trial, _ in gamed]
    more = f" and {len(points) - MAX_NAMED} more" if len(points) > MAX_NAMED else ""
    worst, start = gamed[0]
    verb = "game" if len(gamed) > 1 else "games"
    return (
        f"{', '.join(points[:MAX_NAMED])}{more} {verb} the reward model: in {worst.name} its "
        f"score went from {number(start[REWARD_MODEL])} to {number(worst.metrics[REWARD_MODEL])} "
        f"while the held-out score fell from {number(start[SCORE])} to "
        f"{number(worst.metrics[SCORE])} by step {worst.step}."
    )


def _of_favourite(judged: Sequence[TrialRecord], *, is_gamed: bool) -> str:
    """Whether it is the reward model's favourite too, of the trials that came as far."""
    best = max(judged, key=lambda trial: trial.metrics[SCORE])
    as_far = [trial for trial in judged if trial.step == best.step]
    liked = max(as_far, key=lambda trial: trial.metrics[REWARD_MODEL])
    if best.metrics[SCORE] - liked.metrics[SCORE] < MIN_LOSS:
        agrees = len(as_far) > 1 and not is_gamed
        return "Reward model and held-out score agree on the best trial." if agrees else ""
    return (
        f"The reward model likes {point_text(liked.point)} best "
        f"({number(liked.metrics[REWARD_MODEL])}, against {number(best.metrics[REWARD_MODEL])} at "
        f"{point_text(best.point)}), but the held-out score there is only "
        f"{number(liked.metrics[SCORE])} instead of {number(best.metrics[SCORE])}."
    )
