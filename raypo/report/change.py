"""Significance of changes: the difference of two means with its 95 % interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypo.storage.run_files import RunFiles

MIN_UNITS = 10
"""Minimum number of prompts for an interval. A paired change also needs this number of prompts
whose score changed, or it has no direction. With fewer prompts, the interval would not cover
95 %."""
MIN_STEPS = 5
"""Minimum number of first steps, and of last steps, for a comparison of their means."""


@dataclass(frozen=True)
class Change:
    """Two means and the uncertainty of their difference."""

    before: float
    after: float
    margin: float | None
    """Half-width of the 95 % interval around `after - before`. None means too little data."""
    basis: str
    """Description of the compared data."""
    num_changed: int | None = None
    """Number of pairs with different values. None means that the comparison is unpaired."""

    @property
    def direction(self) -> int | None:
        """Direction of the change: 1 or -1. 0 means no clear change, None means too little data."""
        if self.margin is None:
            return None
        is_rare = self.num_changed is not None and self.num_changed < MIN_UNITS
        gain = self.after - self.before
        return 0 if is_rare or abs(gain) <= self.margin else int(math.copysign(1, gain))

    @property
    def words(self) -> str:
        """Text on interval and data, like `95 % interval of the change +0.30 to +0.41; ...`."""
        if self.margin is None:
            return f"{self.basis}: too few for an interval"
        if self.num_changed == 0:
            return f"no value changed; {self.basis}"
        gain = self.after - self.before
        low, high = gain - self.margin, gain + self.margin
        digits = decimals(self.margin)
        return f"95 % interval of the change {low:+.{digits}f} to {high:+.{digits}f}; {self.basis}"


def paired_change(before: Mapping[Any, float], after: Mapping[Any, float]) -> Change | None:
    """Return the change of the mean over the shared prompts, by Student's t of the differences.

    Paper: Student 1908.

    Args:
        before: Mean score of each prompt's samples.
        after: The same at a later time.

    Returns:
        The change, or None if there are no shared prompts.
    """
    shared = [key for key in before if key in after]
    if not shared:
        return None
    gains = [after[key] - before[key] for key in shared]
    up, down = (sum(sign * gain > 0 for gain in gains) for sign in (1, -1))
    count = len(gains)
    margin = None
    if count >= MIN_UNITS:
        margin = t_quantile(count - 1) * statistics.stdev(gains) / math.sqrt(count)
    return Change(
        statistics.fmean(before[key] for key in shared),
        statistics.fmean(after[key] for key in shared),
        margin,
        f"{up} prompts better, {down} worse, of {count}",
        num_changed=up + down,
    )


def unpaired_change(
    before: tuple[float, float, float], after: tuple[float, float, float], basis: str
) -> Change:
    """Return the change between two independent samples, by Welch's t.

    Paper: Welch 1947.

    Args:
        before: Mean, sample variance and number of units.
        after: The same at a later time.
        basis: Description of the compared data.
    """
    (mean, variance, count), (last_mean, last_variance, last_count) = before, after
    squares = variance / count, last_variance / last_count
    total = sum(squares)
    margin = 0.0
    if total > 0:
        degrees = total**2 / (squares[0] ** 2 / (count - 1) + squares[1] ** 2 / (last_count - 1))
        margin = t_quantile(degrees) * math.sqrt(total)
    return Change(mean, last_mean, margin, basis)


def t_quantile(degrees: float) -> float:
    """Return the 97.5 % quantile of Student's t: half of a 95 % interval, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def scores_by_prompt(rows: Iterable[Mapping[str, Any]]) -> dict[Any, float]:
    """Return the mean score of each prompt, because samples of a prompt are correlated.

    Args:
        rows: Rollouts with `group_index`, `prompt`, `score` and `row_index`. Rollouts without a
            score are skipped, and so are an episode's later conversations, because the first one
            stands for the sample.
    """
    scores: dict[Hashable, list[float]] = {}
    for row in rows:
        if row["score"] is not None and not row["row_index"]:
            scores.setdefault((row["group_index"], row["prompt"]), []).append(row["score"])
    return {key: statistics.fmean(values) for key, values in scores.items()}


def held_out_change(files: RunFiles, step: int | None = None) -> tuple[int, int, Change] | None:
    """Compare the held-out scores of a run's first and last evaluation, paired by prompt.

    Args:
        files: Files of the run.
        step: Last step whose evaluation may be used. None means no limit.

    Returns:
        The steps of both evaluations (0 is before the first update), and the change. The
        result is None if fewer than two evaluations are saved, or if they share no prompt.
    """
    steps = [s for s in files.rollout_steps(held_out=True) if step is None or s <= step]
    if len(steps) < 2:
        return None
    first, last = steps[0], steps[-1]
    change = paired_change(*(held_out_scores(files, number) for number in (first, last)))
    return None if change is None else (first, last, change)


def held_out_scores(files: RunFiles, step: int) -> dict[Any, float]:
    """Return the mean score of each held-out prompt's samples in an evaluation."""
    columns = ("group_index", "prompt", "score", "row_index")
    return scores_by_prompt(files.rollouts(step, held_out=True, columns=columns))


def held_out_evaluations(files: RunFiles) -> dict[int, dict[Any, float]]:
    """Return `held_out_scores` of each saved evaluation by its step, in the order of the steps."""
    steps = files.rollout_steps(held_out=True)
    return {step: scores for step in steps if (scores := held_out_scores(files, step))}


def lead_words(
    scores: Mapping[str, Mapping[Any, float]],
    *,
    label: str = "held-out score",
    steps: Mapping[str, int] | None = None,
) -> str:
    """Return a sentence that compares the best of several models with the second best.

    Args:
        scores: Scores of the same prompts, for two or more models by name.
        label: Label of the scores.
        steps: Steps at which the models were scored, by name. None omits the steps from the
            sentence.
    """
    means = {name: statistics.fmean(by_prompt.values()) for name, by_prompt in scores.items()}
    best, second = sorted(means, key=lambda name: -means[name])[:2]
    lead = paired_change(scores[second], scores[best])
    assert lead is not None, f"{best} and {second} have no prompt in common"
    when = {name: f" at step {steps[name]}" if steps else "" for name in (best, second)}
    of_best, of_second = (f"{means[name]:.3f}{when[name]}" for name in (best, second))
    interval = lead.words.replace("of the change", "of the difference")
    if lead.direction == 1:
        return f"{best} is best: {label} {of_best}, next {second} with {of_second} ({interval})."
    return (
        f"Which is best is not decided: {best} has the highest {label}, {of_best}, but the "
        f"difference to {second} with {of_second} may be chance ({interval})."
    )


def change_over_steps(rows: Sequence[Mapping[str, Any]], name: str) -> Change | None:
    """Return the change over a run of a metric that is measured on new data in each step.

    The means of the first and of the last steps are compared. The unit is a step, so correlations
    within a step do not matter. With too few steps, the first and the last one are compared, and
    there is no interval.

    Args:
        rows: The run's metrics by step.
        name: Name of the metric.

    Returns:
        The change, or None if fewer than two steps have the metric.
    """
    seen = [row for row in rows if math.isfinite(row.get(name, math.nan))]
    if len(seen) < 2:
        return None
    if len(seen) < 2 * MIN_STEPS:
        steps = f"step {seen[0]['step']} against step {seen[-1]['step']}"
        return Change(seen[0][name], seen[-1][name], None, steps)
    count = max(MIN_STEPS, len(seen) // 4)
    ends = [[row[name] for row in part] for part in (seen[:count], seen[-count:])]
    start, end = ((statistics.fmean(e), statistics.variance(e), float(count)) for e in ends)
    return unpaired_change(start, end, f"means of the first and of the last {count} steps")


def decimals(margin: float) -> int:
    """Return the number of decimals that shows two significant digits of a margin: 2 or more."""
    return 2 if margin < 1e-9 else min(max(2, 1 - math.floor(math.log10(margin))), 5)
