"""Draw the prompts of a run in order, and count their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raypo.data.stream import ShuffledStream
from raypo.rollout.curriculum import CurriculumStream
from raypo.rollout.dynamic_sampling import Collected
from raypo.rollout.sample_counts import SampleCounts
from raypo.types import Prompt, Rollout


@dataclass
class PromptSource:
    """Source of the prompts of a run. Only one thread at a time may use it."""

    stream: ShuffledStream[Prompt]
    samples_per_prompt: int
    sample_counts: SampleCounts = field(default_factory=SampleCounts)

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts. They know their draw (`Prompt.group_index`)."""
        self.sample_counts.ask(num_prompts * self.samples_per_prompt)
        taken = self.stream.take(num_prompts)
        return [replace(prompt, group_index=draw) for draw, prompt in taken]

    def counts(self, batch: Collected) -> tuple[int, int, int]:
        """Count the samples of a step's batch and reset the counts (`SampleCounts.of_step`)."""
        return self.sample_counts.of_step(batch)

    @property
    def drawn(self) -> int:
        """Index of the next draw."""
        return self.stream.state_dict()["position"]

    @property
    def curriculum(self) -> CurriculumStream | None:
        """The stream if it chooses prompts by their pass rates, else None."""
        return self.stream if isinstance(self.stream, CurriculumStream) else None

    def learn(self, scored: Sequence[Rollout], *, until: int) -> None:
        """Update the curriculum, if there is one.

        Args:
            scored: Samples of draws before `until`. Draws without samples have failed.
            until: The first draw that has no outcome yet.
        """
        if self.curriculum:
            self.curriculum.learn(self.curriculum.outcomes(scored), until)

    def pass_rates(self, batch: Collected, following: int) -> dict[str, float]:
        """Merge old outcomes in the curriculum, and return its metrics after a step.

        The result is empty if there is no curriculum.

        Args:
            batch: The rollouts of the step.
            following: Index of the first draw after the step.
        """
        if self.curriculum is None:
            return {}
        metrics = self.curriculum.settled(following)
        outcomes = self.curriculum.outcomes(batch.scored).values()
        passed = sum(outcome.passed for outcome in outcomes)
        if count := passed + sum(outcome.failed for outcome in outcomes):
            metrics["curriculum/step_pass_rate"] = passed / count
        return metrics

    def position(self, at: int) -> dict[str, Any]:
        """Return the position of the stream before a draw, for a checkpoint."""
        if self.curriculum:
            return self.curriculum.state_dict(at)
        return self.stream.state_dict() | {"position": at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position from a checkpoint's state."""
        self.stream.load_state_dict(state["stream"])
        # Samples that were in flight count as lost. `RolloutController.restore` replaces these
        # counts if it finds saved rollouts.
        lost = int(state.get("metrics", {}).get("rollout/samples_carried", 0))
        self.sample_counts = SampleCounts(carried=lost, lost=lost)
