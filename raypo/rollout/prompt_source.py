"""Draw the prompts of a run in order, share them between the workers, and count their samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raypo.collectives import Workers, as_tensor
from raypo.data.stream import ShuffledStream
from raypo.rollout.curriculum import CurriculumStream, Outcome
from raypo.rollout.dynamic_sampling import Collected
from raypo.rollout.sample_counts import SampleCounts
from raypo.types import Prompt, Rollout


@dataclass
class PromptSource:
    """Source of this worker's prompts. Only one thread at a time may use it."""

    stream: ShuffledStream[Prompt]
    samples_per_prompt: int
    sample_counts: SampleCounts = field(default_factory=SampleCounts)

    def draw(self, num_prompts: int, workers: Workers) -> list[Prompt]:
        """Return this worker's share of the next prompts. All workers call it with the same number.

        All workers hold the same stream. The prompts know their draw (`Prompt.group_index`).

        Args:
            num_prompts: Number of prompts over all workers.
            workers: The workers that share the prompts.
        """
        share = self.stream.take(num_prompts)[workers.rank :: workers.count]
        prompts = [replace(prompt, group_index=draw) for draw, prompt in share]
        self.sample_counts.ask(len(prompts) * self.samples_per_prompt)
        return prompts

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

    def outcomes(self, scored: Sequence[Rollout], workers: Workers) -> dict[int, Outcome]:
        """Return all workers' outcomes by draw, for `learn`, or {} if there is no curriculum.

        Args:
            scored: This worker's samples of some draws. All samples of a draw are on one worker.
            workers: All workers, which call this together.
        """
        if self.curriculum is None:
            return {}
        shares = workers.gather(self.curriculum.outcomes(scored))
        return {draw: outcome for share in shares for draw, outcome in share.items()}

    def learn(self, outcomes: Mapping[int, Outcome], *, until: int | None = None) -> None:
        """Update the curriculum, if there is one, with the outcomes of all draws before `until`.

        Args:
            outcomes: All workers' outcomes by draw.
            until: The first draw that has no outcome yet. None means the next draw.
        """
        if self.curriculum:
            self.curriculum.learn(outcomes, self.drawn if until is None else until)

    def pass_rates(self, batch: Collected, workers: Workers) -> dict[str, float]:
        """Merge old outcomes in the curriculum, and return its metrics after a step.

        The result is empty if there is no curriculum.

        Args:
            batch: This worker's rollouts of the step.
            workers: All workers, which call this together.
        """
        return self.settled(self.drawn) | self.step_pass_rate(batch, workers)

    def settled(self, draw: int) -> dict[str, float]:
        """Merge old outcomes and return the curriculum's metrics (`CurriculumStream.settled`).

        Args:
            draw: Index of the first draw after the current step.
        """
        return self.curriculum.settled(draw) if self.curriculum else {}

    def step_pass_rate(self, batch: Collected, workers: Workers) -> dict[str, float]:
        """Return the metric of the pass rate of a step's samples, or {} without a curriculum."""
        if self.curriculum is None:
            return {}
        outcomes = self.curriculum.outcomes(batch.scored).values()
        counts = sum(each.passed for each in outcomes), sum(each.failed for each in outcomes)
        passed, failed = workers.sum(as_tensor(*counts)).tolist()
        return {"curriculum/step_pass_rate": passed / (passed + failed)} if passed + failed else {}

    def position(self, at: int | None = None) -> dict[str, Any]:
        """Return the position of the stream, for a checkpoint.

        Args:
            at: The first draw after the position. None means the next draw.
        """
        if self.curriculum:
            return self.curriculum.state_dict(self.drawn if at is None else at)
        return self.stream.state_dict() | ({} if at is None else {"position": at})

    def load_state_dict(self, state: Mapping[str, Any], workers: Workers) -> None:
        """Restore the position from a checkpoint's state."""
        self.stream.load_state_dict(state["stream"])
        # Samples that were in flight count as lost. `AsyncRollouts.restore` replaces these counts
        # if it finds saved rollouts.
        if workers.rank == 0:
            lost = int(state.get("metrics", {}).get("rollout/samples_carried", 0))
            self.sample_counts = SampleCounts(carried=lost, lost=lost)

    def save(self, directory: Path, workers: Workers) -> None:
        """Write nothing, because no sample is kept after its step."""

    def restore(self, directory: Path, workers: Workers) -> None:
        """Read nothing, because `save` writes nothing."""
