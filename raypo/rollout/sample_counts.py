"""Counts of samples, from the request to the step that trains them."""

from __future__ import annotations

from dataclasses import dataclass

from raypo.collectives import Workers, as_tensor
from raypo.rollout.collect import samples_of
from raypo.rollout.dynamic_sampling import Collected


@dataclass
class SampleCounts:
    """Counts of one worker's samples that were requested; an agent's episode is one sample."""

    carried: int = 0
    """Samples that no step has taken yet."""
    lost: int = 0
    """Carried samples that a checkpoint did not keep, and that were not requested again yet."""
    _asked: int = 0
    _asked_again: int = 0

    def ask(self, count: int) -> None:
        """Count samples that are requested now; lost ones are requested first."""
        again = min(count, self.lost)
        self.lost -= again
        self._asked_again += again
        self._asked += count - again
        self.carried += count - again

    def of_step(self, batch: Collected) -> tuple[int, int, int]:
        """Count the samples that a step has taken.

        Returns:
            Samples requested, and requested again, since the last call; and those carried.
        """
        self.carried -= len(samples_of(batch.scored))
        asked, again = self._asked, self._asked_again
        self._asked = self._asked_again = 0
        return asked, again, self.carried


def sample_count_metrics(
    counts: tuple[int, int, int],
    collected: Collected,
    workers: Workers,
    *,
    step: int,
    max_staleness: int | None,
) -> dict[str, float]:
    """Return a step's counts over all workers, which all call it together.

    Samples that were carried before, and those that the step requested, are trained, filtered,
    failed, dropped, or carried on. The first four are the samples of the step's batch.

    Args:
        counts: This worker's counts (`SampleCounts.of_step`).
        collected: The batch.
        step: The step, counted from 1.
        max_staleness: `ppo.correction.max_staleness`: samples without a newer token are dropped.
    """
    dropped = _num_dropped(collected, step, max_staleness) if max_staleness is not None else 0
    totals = workers.sum(as_tensor(*counts, dropped)).tolist()
    names = ("asked", "asked_again", "carried", "dropped")
    metrics = {f"rollout/samples_{name}": n for name, n in zip(names, totals, strict=True)}
    trained = collected.metrics["rollout/samples_trained"]
    return metrics | {"rollout/samples_trained": trained - metrics["rollout/samples_dropped"]}


def _num_dropped(collected: Collected, step: int, max_staleness: int) -> int:
    newest: dict[tuple[int, int], int] = {}  # of each sample, all its rows together
    for rollout in (each.rollout for each in collected.trained):
        sample = rollout.group_index, rollout.sample_index
        versions = rollout.weight_versions[rollout.response_mask]
        newest[sample] = max(versions.max(), newest.get(sample, -1))
    return sum(step - 1 - version > max_staleness for version in newest.values())
