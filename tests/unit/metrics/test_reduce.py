import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from raypo.collectives import Workers
from raypo.metrics.reduce import WeightedMeans


@dataclass(frozen=True)
class AmongOthers(Workers):
    """A worker whose peers hold what `others` hold; it counts its collectives."""

    others: tuple[WeightedMeans, ...] = ()
    calls: list[str] = None  # type: ignore[assignment]

    def gather(self, value: Any) -> list[Any]:
        self.calls.append("gather")
        return [value, *(other._shares for other in self.others)]


def reduce_all(*parts: WeightedMeans) -> dict[str, float]:
    return parts[0].reduce(AmongOthers(others=parts[1:], calls=[]))


def losses(*microbatches: list[float]) -> WeightedMeans:
    means = WeightedMeans()
    for values in microbatches:
        means.add("ppo/policy_loss", sum(values), len(values))
    return means


def test_a_mean_is_the_sum_of_totals_over_the_sum_of_weights():
    means = WeightedMeans()
    means.add("ppo/policy_loss", 6.0, 3)
    means.add("ppo/policy_loss", 2.0, 1)

    assert means.reduce(Workers()) == {"ppo/policy_loss": 2.0}


def test_the_mean_depends_on_neither_the_cut_into_microbatches_nor_the_number_of_workers():
    values = [0.5, 1.25, -3.0, 8.0, 2.25]
    whole = reduce_all(losses(values))

    assert reduce_all(losses(values[:2], values[2:])) == whole
    assert reduce_all(losses(values[:4]), losses(values[4:])) == whole
    assert reduce_all(losses(values[:1]), losses(), losses(values[1:2], values[2:])) == whole
    assert whole == {"ppo/policy_loss": 9.0 / 5}


def test_counts_are_summed_and_maxima_are_the_largest():
    mine, other = WeightedMeans(), WeightedMeans()
    mine.total("rollout/failed", 2)
    mine.total("rollout/failed", 1)
    other.total("rollout/failed", 4)
    mine.maximum("mismatch/max", 0.5)
    other.maximum("mismatch/max", -0.25)
    other.maximum("mismatch/max", 0.75)

    assert reduce_all(mine, other) == {"mismatch/max": 0.75, "rollout/failed": 7.0}


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_a_deviation_depends_on_neither_the_offset_nor_the_number_of_workers(offset: float):
    values = [offset + number for number in (0, 1, 1, 4, 0, 0)]

    def deviations(*shares: list[float]) -> WeightedMeans:
        means = WeightedMeans()
        for share in shares:
            means.deviation("rollout/score_std", share)
        return means

    expected = {"rollout/score_std": pytest.approx(math.sqrt(2.0), rel=1e-8)}
    assert reduce_all(deviations(values)) == expected
    assert reduce_all(deviations(values[:1]), deviations([]), deviations(values[1:])) == expected
    assert reduce_all(deviations(values[:2], values[2:4]), deviations(values[4:])) == expected
    assert reduce_all(deviations([])) == {}


def test_names_are_sorted_and_need_not_be_known_to_every_worker():
    mine, other = WeightedMeans(), WeightedMeans()
    mine.add("b", 1.0, 1)
    other.add("c", 4.0, 2)
    other.total("a", 3)

    assert list(reduce_all(mine, other).items()) == [("a", 3.0), ("b", 1.0), ("c", 2.0)]
    assert reduce_all(mine, other) == reduce_all(other, mine)


def test_one_collective_however_many_figures():
    means = WeightedMeans()
    for number in range(20):
        means.add(f"mean/{number}", 1.0, 1)
        means.maximum(f"max/{number}", 1.0)
    calls: list[str] = []

    means.reduce(AmongOthers(others=(), calls=calls))

    assert calls == ["gather"]


def test_the_order_of_workers_does_not_change_a_single_bit():
    parts = [losses([value]) for value in (1e16, 1.0, -1e16, 0.1)]

    assert reduce_all(*parts) == reduce_all(*reversed(parts))
    assert reduce_all(*parts) == {"ppo/policy_loss": math.fsum([1e16, 1.0, -1e16, 0.1]) / 4}


def test_sums_are_float64():
    means = WeightedMeans()
    means.total("tokens", np.float32(2**24))
    means.total("tokens", 1)  # lost in float32

    assert means.reduce(Workers()) == {"tokens": 2**24 + 1}


def test_a_mean_of_no_weight_is_nan_and_a_nan_stays_one():
    means = WeightedMeans()
    means.add("empty", 0.0, 0)
    means.add("broken", math.nan, 1)
    means.add("broken", 1.0, 1)
    means.maximum("broken_max", math.nan)
    means.maximum("broken_max", 1.0)

    reduced = means.reduce(Workers())
    assert list(reduced) == ["broken", "broken_max", "empty"]
    assert all(map(math.isnan, reduced.values()))
