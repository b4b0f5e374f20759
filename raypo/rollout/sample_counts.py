"""Counts of samples, from the request to the step that trains them."""

from __future__ import annotations

from dataclasses import dataclass

from raypo.rollout.collect import samples_of
from raypo.rollout.dynamic_sampling import Collected


@dataclass
class SampleCounts:
    """Counts of the samples that were requested. An episode counts as one sample."""

    carried: int = 0
    """Samples that no step has taken yet."""
    lost: int = 0
    """Carried samples that a checkpoint did not keep and that were not requested again yet."""
    _asked: int = 0
    _asked_again: int = 0

    def ask(self, count: int) -> None:
        """Count samples that are requested now. Lost samples are requested again first."""
        again = min(count, self.lost)
        self.lost -= again
        self._asked_again += again
        self._asked += count - again
        self.carried += count - again

    def of_step(self, batch: Collected) -> tuple[int, int, int]:
        """Count the samples that a step has taken, and reset the counts of requests.

        Returns:
            The number of samples requested for the first time since the last call, the number
            requested again since the last call, and the number that no step has taken yet.
        """
        self.carried -= len(samples_of(batch.scored))
        asked, again = self._asked, self._asked_again
        self._asked = self._asked_again = 0
        return asked, again, self.carried


def sample_count_metrics(
    counts: tuple[int, int, int],
    collected: Collected,
    *,
    step: int,
    max_staleness: int | None,
) -> dict[str, float]:
    """Return a step's counts.

    A sample that was carried into the step or requested during it is trained, filtered, failed,
    dropped, or carried to the next step. The first four kinds are the samples of the step's batch.

    Args:
        counts: The counts of `SampleCounts.of_step`.
        collected: The batch.
        step: The step, counted from 1.
        max_staleness: Value of `ppo.correction.max_staleness`. A sample is dropped if all its
            tokens are staler. None means that none is dropped.
    """
    dropped = _num_dropped(collected, step, max_staleness) if max_staleness is not None else 0
    names = ("asked", "asked_again", "carried", "dropped")
    totals = zip(names, (*counts, dropped), strict=True)
    metrics = {f"rollout/samples_{name}": float(count) for name, count in totals}
    trained = collected.metrics["rollout/samples_trained"]
    return metrics | {"rollout/samples_trained": trained - dropped}


def _num_dropped(collected: Collected, step: int, max_staleness: int) -> int:
    newest: dict[tuple[int, int], int] = {}  # sample -> newest version in any of its rows
    for rollout in collected.trained:
        sample = rollout.group_index, rollout.sample_index
        versions = rollout.weight_versions[rollout.response_mask]
        newest[sample] = max(versions.max(), newest.get(sample, -1))
    return sum(step - 1 - version > max_staleness for version in newest.values())
