"""The loop of the recipes that learn from examples: sft, dpo, reward_model."""

from __future__ import annotations

from typing import Any

from raypo.metrics.clock import Clock
from raypo.run.examples_run import ExamplesRun
from raypo.run.run import open_run


def examples_loop(setup: dict[str, Any], kind: type[ExamplesRun[Any, Any]]) -> dict[str, Any]:
    """A whole run on one learner worker.

    Args:
        setup: `config.model_dump()` of an ExamplesConfig.
        kind: The recipe's view of it: what is read, and what is learned of it.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    with open_run(setup, kind) as run:
        engine = run.start_engine()  # where `eval.function` judges sampled answers
        learner = run.start_learner()
        run.evaluate_before_first_update(learner, engine)

        for step in run.steps():
            clock = Clock()
            metrics = learner.update(run.draw_batch(), step=step)
            clock.lap("time/update_s")
            is_evaluated = run.is_evaluation_due(step)
            if is_evaluated:
                metrics |= run.evaluate(learner, engine, version=step)
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint, to_ray=is_evaluated)

        return run.finish()
