"""PPO in seven steps. Steps 1 and 2 of a run with a driver are in `raypo.trainer`; this is what
every learner worker does: the same code, each with its own share of the prompts.
"""

from __future__ import annotations

from typing import Any

from raypo.metrics.clock import Clock
from raypo.recipes.run import open_run
from raypo.rollout.advantages import mismatch, with_advantages
from raypo.rollout.collect import judge, sample, trainable
from raypo.rollout.dealing import deal, to_experience


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole PPO run on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of a PPOConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    with open_run(setup) as run:
        config, workers, seed = run.config, run.workers, run.config.seed
        services = run.start_services()  # 2. engines, reference
        learner = run.start_learner()  # 3. policy and critic; restored where there is a checkpoint
        run.push_weights(learner, services, version=run.last_step)
        run.evaluate_before_first_update(services)

        for step in run.steps():
            clock = Clock()
            draws = run.draw_prompts()
            rollouts = sample(draws, services.engine, run.tokenizer, run.sampling)  # 4. generate,
            clock.lap("time/generate_s")
            scored = judge(rollouts, run.reward_function, services.reference)
            clock.lap("time/score_s")  # score; old log-probs and values
            dealt = deal(
                trainable(scored, config.reward, workers),
                minibatch_size=config.ppo.minibatch_size,
                seed=(seed, step),
                workers=workers,
            )
            experience = learner.evaluate(to_experience(dealt))
            clock.lap("time/evaluate_s")

            experience, figures = with_advantages(experience, config.ppo, workers)  # 5. advantages,
            metrics = figures | mismatch(experience, workers) | run.describe(scored)
            run.save_rollouts(step, dealt, experience)
            clock.lap("time/save_rollouts_s")
            metrics |= learner.update(experience, step=step)  # PPO epochs
            clock.lap("time/update_s")

            metrics |= run.push_weights(learner, services, version=step)  # 6. versioned, verified
            clock.lap("time/push_weights_s")

            metrics |= run.evaluate_when_due(step, services)  # 7. held-out score,
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)  # checkpoint, policy,
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint)  # report

        return run.finish()
