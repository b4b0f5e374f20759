"""Metrics of a step that depend on neither the number of workers nor the cut into microbatches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    from raypo.collectives import Workers


class _Share(NamedTuple):
    kind: str  # mean | max | sum
    value: float
    weight: float = 0.0


class WeightedMeans:
    """Accumulates means, maxima and counts in float64 and joins those of all workers.

    Example: two microbatches with losses that sum to 6 over 3 tokens and 2 over 1 token:
    `add("ppo/policy_loss", 6, 3)`, `add("ppo/policy_loss", 2, 1)`, and the mean is 8 / 4 = 2.
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}

    def add(self, name: str, total: SupportsFloat, weight: SupportsFloat) -> None:
        """Add a share of a mean: the sum of some values and how much they count for."""
        self._join(name, _Share("mean", float(total), float(weight)))

    def total(self, name: str, value: SupportsFloat) -> None:
        """Add a share of a count; shares are summed."""
        self._join(name, _Share("sum", float(value)))

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """Add a candidate for the largest value; one NaN makes it NaN."""
        self._join(name, _Share("max", float(value)))

    def reduce(self, workers: Workers) -> dict[str, float]:
        """Join the metrics of all workers, on every worker, sorted by name; one collective.

        A name need not be known to every worker. A mean of no weight at all is NaN.
        """
        parts = workers.gather(self._shares)
        reduced: dict[str, float] = {}
        for name in sorted(set().union(*parts)):
            whole = _joined(name, [part[name] for part in parts if name in part])
            if whole.kind == "mean":
                reduced[name] = whole.value / whole.weight if whole.weight else math.nan
            else:
                reduced[name] = whole.value
        return reduced

    def _join(self, name: str, share: _Share) -> None:
        mine = self._shares.get(name)
        self._shares[name] = share if mine is None else _joined(name, [mine, share])


def without_lone(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """The metrics without a part that is a whole by itself: the only name that begins so."""
    parts = [name for name in metrics if name.startswith(prefix)]
    return {name: value for name, value in metrics.items() if [name] != parts}


def _joined(name: str, shares: list[_Share]) -> _Share:
    kinds = {share.kind for share in shares}
    assert len(kinds) == 1, f"{name} is booked as {' and as '.join(sorted(kinds))}"
    values = [share.value for share in shares]
    if shares[0].kind == "max":
        return _Share("max", math.nan if any(map(math.isnan, values)) else max(values))
    return _Share(shares[0].kind, _sum(values), _sum([share.weight for share in shares]))


def _sum(values: list[float]) -> float:
    """The exactly rounded sum, so that the order of workers cannot matter; inf and NaN pass."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
