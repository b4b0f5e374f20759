"""Draw the prompts of a run in order, and count their samples until a step takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypo.data.stream import ShuffledStream
from raypo.rollout.collect import samples_of
from raypo.rollout.curriculum import CurriculumStream
from raypo.rollout.step_batch import StepBatch
from raypo.types import Prompt, Rollout


@dataclass
class PromptSource:
    """Source of the prompts of a run. Only one thread at a time may use it."""

    stream: ShuffledStream[Prompt]
    samples_per_prompt: int
    num_carried: int = 0
    """Number of samples that no step has taken yet. An episode counts as one sample."""
    num_lost: int = 0
    """Carried samples that a checkpoint did not keep and that were not requested again yet."""
    _num_asked: int = 0
    _num_asked_again: int = 0

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts. They know their draw (`Prompt.group_index`)."""
        num_samples = num_prompts * self.samples_per_prompt
        again = min(num_samples, self.num_lost)  # lost samples are requested again first
        self.num_lost -= again
        self._num_asked_again += again
        self._num_asked += num_samples - again
        self.num_carried += num_samples - again
        return [replace(prompt, group_index=draw) for draw, prompt in self.stream.take(num_prompts)]

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Return the counts of samples after a step has taken its batch, as metrics.

        They are the samples requested for the first time and requested again since the last call,
        and the samples that no step has taken yet.
        """
        self.num_carried -= len(samples_of(batch.scored))
        counts = {
            "rollout/samples_asked": float(self._num_asked),
            "rollout/samples_asked_again": float(self._num_asked_again),
            "rollout/samples_carried": float(self.num_carried),
        }
        self._num_asked = self._num_asked_again = 0
        return counts

    def saved_counts(self, num_saved: int) -> dict[str, int]:
        """Return the counts for a checkpoint that keeps `num_saved` of the carried samples."""
        return {
            "carried": self.num_carried,
            "lost": self.num_carried - num_saved,
            "asked": self._num_asked,
            "asked_again": self._num_asked_again,
        }

    def load_counts(self, *, carried: int, lost: int, asked: int = 0, asked_again: int = 0) -> None:
        """Restore the counts from a checkpoint."""
        self.num_carried, self.num_lost = carried, lost
        self._num_asked, self._num_asked_again = asked, asked_again

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

    def pass_rates(self, batch: StepBatch, following: int) -> dict[str, float]:
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
        self.load_counts(carried=lost, lost=lost)
