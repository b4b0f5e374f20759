"""Figures of a step that depend on neither the number of workers nor the cut into microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    from raypo.collectives import Workers


class _Figure(NamedTuple):
    kind: str  # mean | max | sum
    value: float
    weight: float = 0.0


class WeightedMeans:
    """Accumulates means, maxima and counts in float64 and joins those of all workers.

    Example: two microbatches with losses that sum to 6 over 3 tokens and 2 over 1 token:
    `add("ppo/policy_loss", 6, 3)`, `add("ppo/policy_loss", 2, 1)`, and the mean is 8 / 4 = 2.
    """

    def __init__(self) -> None:
        self._figures: dict[str, _Figure] = {}

    def add(self, name: str, total: SupportsFloat, weight: SupportsFloat) -> None:
        """A share of a mean: the sum of the values and how much they count for."""
        self._join(name, _Figure("mean", float(total), float(weight)))

    def total(self, name: str, value: SupportsFloat) -> None:
        """A share of a count; shares are summed."""
        self._join(name, _Figure("sum", float(value)))

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """A candidate for the largest value; one NaN makes it NaN."""
        self._join(name, _Figure("max", float(value)))

    def reduce(self, workers: Workers) -> dict[str, float]:
        """The figures over all workers, on every worker, sorted by name; one collective.

        A name need not be known to every worker. A mean of no weight at all is NaN.
        """
        parts = workers.gather(self._figures)
        names = sorted(set().union(*parts))
        return {name: _value(_over_workers(name, parts)) for name in names}

    def _join(self, name: str, figure: _Figure) -> None:
        mine = self._figures.get(name)
        self._figures[name] = figure if mine is None else _joined(name, [mine, figure])


def _over_workers(name: str, parts: list[Mapping[str, _Figure]]) -> _Figure:
    return _joined(name, [part[name] for part in parts if name in part])


def _joined(name: str, figures: list[_Figure]) -> _Figure:
    kinds = {figure.kind for figure in figures}
    assert len(kinds) == 1, f"{name} is booked as {' and as '.join(sorted(kinds))}"
    values = [figure.value for figure in figures]
    if figures[0].kind == "max":
        return _Figure("max", math.nan if any(map(math.isnan, values)) else max(values))
    return _Figure(figures[0].kind, _sum(values), _sum([figure.weight for figure in figures]))


def _sum(values: list[float]) -> float:
    """The exactly rounded sum, so that the order of workers cannot matter; inf and NaN pass."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _value(figure: _Figure) -> float:
    if figure.kind != "mean":
        return figure.value
    return figure.value / figure.weight if figure.weight else math.nan
