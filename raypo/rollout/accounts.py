"""What becomes of each sample, from the moment it is asked for to the step that takes it."""

from __future__ import annotations

from dataclasses import dataclass

from raypo.collectives import Workers, as_tensor
from raypo.rollout.collect import samples_of
from raypo.rollout.refill import Collected


@dataclass
class Ledger:
    """One worker's samples that were asked for; an agent's episode is one."""

    carried: int = 0
    """Those that no step has taken yet."""
    lost: int = 0
    """Of these, those that a checkpoint did not keep and that were not asked for again yet."""
    _asked: int = 0
    _asked_again: int = 0

    def ask(self, count: int) -> None:
        """So many are sampled from now on: first what was lost."""
        again = min(count, self.lost)
        self.lost -= again
        self._asked_again += again
        self._asked += count - again
        self.carried += count - again

    def take(self, collected: Collected) -> None:
        """A step has taken its own."""
        self.carried -= len(samples_of(collected.scored))

    def counts(self) -> tuple[int, int, int]:
        """Asked for and asked for again since this was last asked, and carried."""
        asked, again = self._asked, self._asked_again
        self._asked = self._asked_again = 0
        return asked, again, self.carried


def account_metrics(
    counts: tuple[int, int, int],
    collected: Collected,
    workers: Workers,
    *,
    step: int,
    max_staleness: int | None,
) -> dict[str, float]:
    """A step's accounts over all workers, which all call it together.

    What was carried before and what the step has asked for is trained, filtered, failed, dropped,
    or carried on; the first four are the samples of the step's batch.

    Args:
        counts: Of this worker's ledger.
        collected: The batch.
        max_staleness: `ppo.correction.max_staleness`: samples of which no token is newer are
            dropped.
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
