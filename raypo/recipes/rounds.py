"""The loop of the recipes that work in rounds: sample, score, select, then train.

These recipes are `rejection_sampling`, `iterative_dpo` and `distillation`. The `select` method of
each recipe chooses what is learned from a round's samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raypo.learner.roles import Roles
from raypo.metrics.clock import Clock
from raypo.run.examples_run import new_learner, trained_models
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.policy_evaluation import Evaluation
from raypo.run.records import Records
from raypo.run.rollout_metrics import sample_row
from raypo.run.rollouts import Rollouts
from raypo.run.rounds_run import RoundsRecipe
from raypo.run.run import open_run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import start_services
from raypo.run.weight_pusher import WeightPusher


def rounds_loop(setup: dict[str, Any], kind: type[RoundsRecipe[Any, Any]]) -> dict[str, Any]:
    """Run a recipe on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a RoundsConfig.
        kind: Class of the recipe, which selects samples and makes the training task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed round}`.
    """
    with open_run(setup) as run:
        config, workers = run.config, run.workers
        inputs = OnlineInputs.load(run)
        services = start_services(run)
        records = Records(run)
        recipe = kind(run, inputs)
        phases = Phases.of(run, services)
        weights = WeightPusher(run, inputs, services, phases, Roles.shared(workers))
        rollouts = Rollouts(run, inputs, services, phases, weights, changed=recipe.scorer)
        phases.enter(Phase.LEARN)
        run.tell.phase("loading the policy")
        learner = phases.learner = new_learner(run, recipe.make_task)
        checkpoints = Checkpoints(
            run,
            records,
            workers,
            trained_models(config, learner, inputs.tokenizer),
            before_saving=partial(phases.enter, Phase.LEARN),
        )
        if saved := checkpoints.restore(learner, rollouts):
            recipe.load_state_dict(saved)
        weights.push_first(learner, version=records.last_step)
        evaluation = Evaluation(run, rollouts, records)
        evaluation.before_first_update()
        rollouts.begin(last_step=records.last_step)

        for step in records.steps():
            clock = Clock()
            batch = rollouts.take(step, clock)
            selected, metrics = recipe.selected(batch.scored, services, step)
            clock.lap("time/select_s")
            phases.enter(Phase.LEARN)
            metrics |= recipe.train(learner, services, selected, step)
            clock.lap("time/update_s")
            metrics |= recipe.described(rollouts.metrics(batch, step))
            records.write_samples(step, partial(list, map(sample_row, batch.scored)))
            clock.lap("time/save_rollouts_s")

            metrics |= weights.push(learner, version=step)
            rollouts.arrived(step)
            clock.lap("time/push_weights_s")

            metrics |= evaluation.when_due(step)
            clock.lap("time/held_out_s")
            checkpoint = checkpoints.save_when_due(
                step,
                metrics,
                learner,
                samples=batch.scored,
                rollouts=rollouts,
                state=recipe.state_dict(),
            )
            clock.lap("time/checkpoint_s")
            records.report(step, metrics, clock, checkpoint)

        return records.finish()
