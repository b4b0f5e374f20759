"""Watch a metric during a run: its best value so far, and the rules of `stop` that end the run."""

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
    """History of a watched metric."""

    metric: str
    mode: Literal["max", "min"]
    min_change: float = 0.0
    last: float = math.nan
    """Last value after an update. The initial evaluation counts for `best` only."""
    best: float = math.nan
    best_step: int = 0
    since_best: int = 0
    """Number of measurements since the best one."""

    def seen(self, step: int, metrics: Mapping[str, float]) -> Watched:
        """Return the state after a step. It is unchanged if the metric is missing or not finite."""
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
        """Return the state for a checkpoint."""
        return asdict(self)

    def restored(self, state: Mapping[str, Any] | None) -> Watched:
        """Return the saved state, or this one if the saved state has another metric or mode."""
        earlier = Watched(**state) if state else self
        is_same = (earlier.metric, earlier.mode) == (self.metric, self.mode)
        return replace(earlier, min_change=self.min_change) if is_same else self


def reason_to_stop(watched: Watched, rules: StopSection) -> str | None:
    """Return the reason for which the rules end a run. None means that the run goes on."""
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
    """Return a message with the best step, and the initial value if it was measured.

    Args:
        watched: The metric.
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
    """Return the names of the same kind as `metric`: evaluation metrics, or step metrics."""
    return sorted(name for name in metrics if name.startswith(EVAL) == metric.startswith(EVAL))


def check_measured(key: str, metric: str, measured: Sequence[str]) -> str | None:
    """Check that a metric was measured.

    Args:
        key: The config key that names the metric.
        metric: The metric.
        measured: Names of the measured metrics of the same kind.

    Returns:
        A warning if a step metric is missing, because later steps may still measure it. The result
        is None if the metric was measured.

    Raises:
        ConfigError: a held-out metric is missing.
    """
    if metric in measured:
        return None
    near = difflib.get_close_matches(metric, measured, n=1, cutoff=0.6)
    remedy = f"Did you mean {near[0]}?" if near else f"There are {', '.join(measured)}."
    text = f"{key} ({metric}): there is no such metric. {remedy}"
    if metric.startswith(EVAL):
        raise ConfigError(text)
    return text
