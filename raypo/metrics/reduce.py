"""Reduction of metrics, independent of the number of workers and the split into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

if TYPE_CHECKING:
    from raypo.collectives import Workers


class _Share(NamedTuple):
    kind: str  # mean | max | sum | std
    value: float  # for std: the mean
    weight: float = 0.0
    squares: float = 0.0  # for std: sum of squared deviations from the mean


class WeightedMeans:
    """Accumulator of means, maxima and counts in float64, which are reduced over all workers.

    Example: the losses of a micro-batch sum to 6 over 3 tokens, and the losses of another to 2
    over 1 token. After `add("ppo/policy_loss", 6, 3)` and `add("ppo/policy_loss", 2, 1)` the mean
    is 8 / 4 = 2.
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share] = {}

    def add(self, name: str, total: SupportsFloat, weight: SupportsFloat) -> None:
        """Add to a mean: `total` is a sum of values, `weight` the sum of their weights."""
        self._merge(name, _Share("mean", float(total), float(weight)))

    def total(self, name: str, value: SupportsFloat) -> None:
        """Add to a count. The counts of all workers are summed."""
        self._merge(name, _Share("sum", float(value)))

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """Add a candidate for the maximum. A single NaN makes the maximum NaN."""
        self._merge(name, _Share("max", float(value)))

    def deviation(self, name: str, values: Sequence[float]) -> None:
        """Add values to a population standard deviation.

        Means and squared deviations are merged (Chan et al. 1979), because the difference of the
        mean square and the squared mean cancels if the values have a large offset.
        """
        if values:
            mean = _sum(list(values)) / len(values)
            squares = _sum([(value - mean) ** 2 for value in values])
            self._merge(name, _Share("std", mean, len(values), squares))

    def include(self, other: WeightedMeans) -> None:
        """Add the contents of another accumulator of this worker."""
        for name, share in other._shares.items():
            self._merge(name, share)

    def values(self) -> dict[str, float]:
        """Return the metrics of this accumulator alone, sorted by name."""
        return _metric_values([self._shares])

    def reduce(self, workers: Workers) -> dict[str, float]:
        """Return the metrics reduced over all workers, sorted by name.

        This makes one collective call. A metric may be missing on some workers. A mean with zero
        weight is NaN.
        """
        return _metric_values(workers.gather(self._shares))

    def _merge(self, name: str, share: _Share) -> None:
        current = self._shares.get(name)
        self._shares[name] = share if current is None else _merge_shares(name, [current, share])


def slowest(costs: Sequence[float]) -> tuple[int, float]:
    """Return the index of the largest cost, and its ratio to the median of all others."""
    index = max(range(len(costs)), key=lambda index: costs[index])
    others = [cost for number, cost in enumerate(costs) if number != index]
    return index, costs[index] / max(median(others), 1e-9)


def without_lone(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    """Return the metrics, without the only metric that starts with `prefix`.

    Two or more such metrics are kept. A breakdown of a metric into a single part is redundant.
    """
    parts = [name for name in metrics if name.startswith(prefix)]
    return {name: value for name, value in metrics.items() if [name] != parts}


def _metric_values(shares_by_worker: Sequence[dict[str, _Share]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for name in sorted(set().union(*shares_by_worker)):
        merged = _merge_shares(name, [part[name] for part in shares_by_worker if name in part])
        if merged.kind == "mean":
            values[name] = merged.value / merged.weight if merged.weight else math.nan
        elif merged.kind == "std":
            values[name] = math.sqrt(merged.squares / merged.weight)
        else:
            values[name] = merged.value
    return values


def _merge_shares(name: str, shares: list[_Share]) -> _Share:
    kinds = {share.kind for share in shares}
    assert len(kinds) == 1, f"{name} has several kinds: {', '.join(sorted(kinds))}"
    values = [share.value for share in shares]
    if shares[0].kind == "max":
        return _Share("max", math.nan if any(map(math.isnan, values)) else max(values))
    weight = _sum([share.weight for share in shares])
    if shares[0].kind == "std":
        mean = _sum([share.weight * share.value for share in shares]) / weight
        between_shares = [share.weight * (share.value - mean) ** 2 for share in shares]
        return _Share("std", mean, weight, _sum([*(s.squares for s in shares), *between_shares]))
    return _Share(shares[0].kind, _sum(values), weight)


def _sum(values: list[float]) -> float:
    """Return the exactly rounded sum, which does not depend on the order.

    With infinities or NaN it is the ordinary sum.
    """
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
