"""Learner state beside the models: random state, skipped updates, layout of shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from raypo.collectives import Workers
from raypo.config import WorkersSection


class NonFiniteUpdateError(RuntimeError):
    """Error: too many updates in a row had a loss or gradient that is not finite."""


class SkippedUpdates:
    """Counter of consecutive skipped updates, which stops the run after too many."""

    def __init__(self, most: int, rate_keys: str) -> None:
        """Start at 0.

        Args:
            most: `learner.max_skipped_updates`.
            rate_keys: Config keys of the learning rates, for the error message.
        """
        self.in_a_row = 0
        self._most, self._rate_keys = most, rate_keys

    def count(self, applied: bool) -> None:
        """Count an update that was applied or skipped.

        Raises:
            NonFiniteUpdateError: too many updates in a row were skipped.
        """
        self.in_a_row = 0 if applied else self.in_a_row + 1
        if self.in_a_row > self._most:
            raise NonFiniteUpdateError(
                f"{self.in_a_row} updates in a row had a loss or gradient that is not finite "
                f"(learner.max_skipped_updates is {self._most}). Lower {self._rate_keys}, or look "
                f"for extreme scores or examples in this step."
            )


def save_worker_state(
    directory: Path, workers: Workers, section: WorkersSection, skipped: SkippedUpdates
) -> None:
    """Save this worker's random state and counters into a checkpoint."""
    state = {
        "torch": torch.get_rng_state(),
        "skipped_in_a_row": skipped.in_a_row,
        "layout": _layout(workers, section),
    }
    torch.save(state, directory / f"learner_{workers.rank}.pt")


def load_worker_state(
    directory: Path, workers: Workers, section: WorkersSection, skipped: SkippedUpdates
) -> None:
    """Restore what `save_worker_state` wrote.

    Raises:
        ValueError: the number of workers, the ZeRO stage or the optimizer differs.
    """
    first = torch.load(directory / "learner_0.pt", weights_only=True)
    layout = _layout(workers, section)
    if first["layout"] != layout:
        raise ValueError(
            f"{directory}: was saved with {json.dumps(first['layout'])}, this run has "
            f"{json.dumps(layout)}. Resume with the same learner.num_workers, "
            f"learner.critic_workers, learner.zero_stage and learner.optimizer, or start over "
            f"(--fresh; in Python fresh=True)."
        )
    state = torch.load(directory / f"learner_{workers.rank}.pt", weights_only=True)
    torch.set_rng_state(state["torch"])
    skipped.in_a_row = state["skipped_in_a_row"]


def _layout(workers: Workers, section: WorkersSection) -> dict[str, int | str]:
    apart = section.total_workers - section.num_workers
    layout: dict[str, int | str] = {
        "num_workers": workers.count - apart,
        "zero_stage": section.zero_stage,
    }
    if section.optimizer != "adamw":
        layout["optimizer"] = section.optimizer
    return layout | ({"critic_workers": apart} if apart else {})
