"""The prompts of a run: drawn in order, shared by the workers, with counts of their samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raypo.collectives import Workers
from raypo.data.stream import Draw, ShuffledStream
from raypo.rollout.collect import next_draws
from raypo.rollout.dynamic_sampling import Collected
from raypo.rollout.sample_counts import SampleCounts
from raypo.types import Prompt


@dataclass
class PromptSource:
    """Draws prompts for this worker. One thread at a time may use it."""

    stream: ShuffledStream[Prompt]
    samples_per_prompt: int
    sample_counts: SampleCounts = field(default_factory=SampleCounts)

    def draw(self, num_prompts: int, workers: Workers) -> list[Draw]:
        """Return this worker's share of the next prompts; all workers call it alike.

        Args:
            num_prompts: Number of prompts over all workers.
            workers: The workers that share the prompts.
        """
        draws = next_draws(self.stream, num_prompts, workers)
        self.sample_counts.ask(len(draws) * self.samples_per_prompt)
        return draws

    def counts(self, batch: Collected) -> tuple[int, int, int]:
        """Return the counts of the step that took this batch (`SampleCounts.of_step`)."""
        return self.sample_counts.of_step(batch)

    def position(self) -> dict[str, Any]:
        """Return the position of the stream, for a checkpoint."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], workers: Workers) -> None:
        """Restore the position from a checkpoint's state."""
        self.stream.load_state_dict(state["stream"])
        # Samples in flight count as lost, unless `AsyncRollouts.restore` finds them.
        if workers.rank == 0:
            lost = int(state.get("metrics", {}).get("rollout/samples_carried", 0))
            self.sample_counts = SampleCounts(carried=lost, lost=lost)

    def save(self, directory: Path, workers: Workers) -> None:
        """Write nothing: no sample outlives its step."""

    def restore(self, directory: Path, workers: Workers) -> None:
        """Read nothing."""
