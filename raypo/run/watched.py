"""A metric that is watched over a run: its best so far, and when it ends the run."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raypo.config import ConfigError, StopSection
from raypo.metrics.catalogue import Row, reference

EVAL = "eval/"


@dataclass(frozen=True)
class Watched:
    """A metric as it was measured so far."""

    metric: str
    mode: Literal["max", "min"]
    min_change: float = 0.0
    last: float = math.nan
    """After an update; an evaluation before the first one counts as the best alone."""
    best: float = math.nan
    best_step: int = 0
    since_best: int = 0
    """Measurements since the best one."""

    def seen(self, step: int, metrics: Mapping[str, float]) -> Watched:
        """The state after one more step; unchanged where the metric is no finite number."""
        value = metrics.get(self.metric, math.nan)
        if not math.isfinite(value):
            return self
        last = value if step else math.nan
        if math.isnan(self.best) or self.is_better(value, self.best):
            return replace(self, last=last, best=value, best_step=step, since_best=0)
        return replace(self, last=last, since_best=self.since_best + 1)

    def is_better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another by more than `min_change`."""
        gain = (value - other) if self.mode == "max" else (other - value)
        return gain > self.min_change

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def restored(self, state: Mapping[str, Any] | None) -> Watched:
        """The state that `state_dict` saved; unchanged where that was of another metric or mode."""
        earlier = Watched(**state) if state else self
        is_same = (earlier.metric, earlier.mode) == (self.metric, self.mode)
        return replace(earlier, min_change=self.min_change) if is_same else self


def reason_to_stop(watched: Watched, rules: StopSection) -> str | None:
    """Why a run is done by its rules, in words; None: it is not."""
    name, at, patience = watched.metric, rules.at, rules.patience
    if at is not None and math.isfinite(watched.last):
        if watched.mode == "max" and watched.last >= at:
            return f"{name} is {watched.last:.4g}, at least {at:g} (stop.at)"
        if watched.mode == "min" and watched.last <= at:
            return f"{name} is {watched.last:.4g}, at most {at:g} (stop.at)"
    if patience is not None and watched.since_best >= patience:
        return (
            f"{name} was not better than {watched.best:.4g}, of step {watched.best_step}, in "
            f"{watched.since_best} measurements (stop.patience)"
        )
    return None


def best_in_words(watched: Watched, rows: Sequence[Row]) -> str:
    """Name the best step, and the value before the first update if it was measured.

    Args:
        rows: The run's metrics by step.
    """
    words = f"best: step {watched.best_step}, {watched.metric} {watched.best:.4g}, its models in "
    words += "best/"
    start = reference(rows, watched.metric) if watched.metric.startswith(EVAL) else None
    if start is None:
        return words
    if watched.is_better(watched.best, start):
        return f"{words} ({start:.4g} before the first update)"
    return f"{words}; no step was better than the {start:.4g} before the first update"


def of_its_kind(metric: str, metrics: Mapping[str, float]) -> list[str]:
    """The names among `metrics` that are measured when `metric` is: in evaluations or in steps."""
    return sorted(name for name in metrics if name.startswith(EVAL) == metric.startswith(EVAL))


def check_measured(key: str, metric: str, there: Sequence[str]) -> str | None:
    """Refuse a held-out metric that an evaluation did not measure.

    Args:
        key: The config key that names it.
        there: Those of its kind that were measured.

    Returns:
        What there is to say of a metric of the steps that this one lacks; later ones may have it.

    Raises:
        ConfigError: it is a held-out one.
    """
    if metric in there:
        return None
    near = difflib.get_close_matches(metric, there, n=1, cutoff=0.6)
    remedy = f"Did you mean {near[0]}?" if near else f"There are {', '.join(there)}."
    text = f"{key} ({metric}): there is no such metric. {remedy}"
    if metric.startswith(EVAL):
        raise ConfigError(text)
    return text
