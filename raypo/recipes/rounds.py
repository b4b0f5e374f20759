"""The loop of the recipes that go by rounds: rejection sampling and its kin."""

from __future__ import annotations

from typing import Any

from raypo.metrics.clock import Clock
from raypo.run.rounds_run import RoundsRun
from raypo.run.run import open_run


def rounds_loop(setup: dict[str, Any], kind: type[RoundsRun[Any, Any]]) -> dict[str, Any]:
    """A whole run on one learner worker.

    Args:
        setup: `config.model_dump()` of a RoundsConfig.
        kind: The recipe's view of it: what is selected, and what is learned of it.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last round that is done}`.
    """
    with open_run(setup, kind) as run:
        services = run.start_services()
        learner = run.start_learner()
        run.push_weights(learner, services, version=run.last_step)
        run.evaluate_before_first_update(services)

        for step in run.steps():
            clock = Clock()
            scored = run.collect(services, clock)  # sample, judge
            selected, metrics = run.select(scored, services, step)
            clock.lap("time/select_s")
            metrics |= run.train(learner, services, selected, step)
            clock.lap("time/update_s")
            metrics |= run.describe(scored)
            run.save_rollouts(step, scored)
            clock.lap("time/save_rollouts_s")

            metrics |= run.push_weights(learner, services, version=step)
            clock.lap("time/push_weights_s")

            metrics |= run.evaluate_when_due(step, services)
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint)

        return run.finish()
