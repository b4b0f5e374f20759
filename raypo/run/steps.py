"""The loop over the steps of a run, for all recipes. Each effect of a step is one line of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raypo.config import OnlineConfig
from raypo.metrics.clock import Clock, Span
from raypo.pending_work import at_work
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.run.run_checkpoints import Checkpoints
from raypo.types import Rollout


@dataclass
class StepResult:
    """Result of a recipe's part of a step: its batch, its update and, with engines, its push."""

    metrics: dict[str, float]
    state: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's state besides learner and prompts, as plain JSON values for a checkpoint."""
    samples: Sequence[Rollout] = ()
    """This worker's samples, for callbacks."""
    rates: Callable[[Mapping[str, float]], dict[str, float]] = lambda metrics: {}
    """Function that derives rates from all metrics of the step, its times included."""
    spans: Callable[[], Sequence[Span]] = tuple
    """Function that returns the time spans of background work since its last call."""


def run_steps(
    run: Run[Any],
    records: Records,
    checkpoints: Checkpoints,
    train_step: Callable[[int, Clock], StepResult],
    evaluate: Callable[[int], dict[str, float]],
) -> None:
    """Run the remaining steps. All workers call this.

    Args:
        run: The run.
        records: The run's metrics, samples, callbacks and rules.
        checkpoints: The run's checkpoints and models, restored.
        train_step: The recipe's part of a step. It records the times of its phases.
        evaluate: Function of a step that returns metrics of held-out data, or {} if there are none.
    """
    config = run.config
    for step in records.steps():  # ends when a stop rule or the driver says so
        with at_work(f"step {step}", must_move=False):
            clock = Clock()
            result = train_step(step, clock)
            metrics = result.metrics
            is_evaluated = config.eval.is_due(step, last_step=config.num_steps)
            if is_evaluated:
                metrics |= evaluate(step)
            clock.lap("time/held_out_s")
            if records.callbacks:
                metrics |= records.call_callbacks(step, metrics, result.samples)
                clock.lap("time/callbacks_s")
            records.check_stop_rules(step, metrics)
            checkpoint = None
            if records.is_checkpoint_due(step):
                checkpoint = checkpoints.save(step, metrics, result.state)
            clock.lap("time/checkpoint_s")
            # A report waits until Ray Train has polled the last one, which takes longer than a step
            # on examples.
            to_ray = is_evaluated or isinstance(config, OnlineConfig)
            records.report(
                step,
                metrics,
                clock,
                checkpoint,
                spans=result.spans(),
                rates=result.rates,
                to_ray=to_ray,
            )
