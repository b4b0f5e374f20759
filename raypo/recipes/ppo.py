"""PPO in seven steps. Steps 1 and 2 of a run with a driver are in `raypo.trainer`; this is what
every learner worker does: the same code, each with its own share of the prompts.
"""

from __future__ import annotations

from typing import Any

from raypo.metrics.clock import Clock
from raypo.recipes.phases import Phase
from raypo.recipes.ppo_run import PPORun
from raypo.recipes.run import open_run
from raypo.recipes.services import Services
from raypo.rollout.advantages import with_advantages, with_corrections
from raypo.rollout.collect import judge, sample
from raypo.rollout.dealing import deal, to_experience
from raypo.rollout.refill import Collected, fill_step
from raypo.types import ScoredRollout


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole PPO run on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of a PPOConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    with open_run(setup, PPORun) as run:
        config, workers, seed = run.config, run.workers, run.config.seed
        services = run.start_services()  # 2. engines, frozen models
        learner = run.start_learner()  # 3. policy and critic; restored where there is a checkpoint
        run.push_weights(learner, services, version=run.last_step)
        run.evaluate_before_first_update(services)

        for step in run.steps():
            clock = Clock()
            collected = collect(run, services, clock)  # 4. generate and score, below;
            dealt = deal(
                collected.trained,
                minibatch_size=config.ppo.minibatch_size,
                seed=(seed, step),
                workers=workers,
            )
            run.enter(Phase.LEARN)
            experience = learner.evaluate(to_experience(dealt))  # old log-probs and values
            clock.lap("time/evaluate_s")

            experience, figures, next_state = with_advantages(  # 5. advantages,
                experience,
                config.ppo,
                run.advantage_state,
                workers,
                max_new_tokens=config.rollout.max_new_tokens,
                step=step,
            )
            experience, mismatch = with_corrections(
                experience, config.ppo.correction, workers, version=run.last_step
            )
            metrics = figures | mismatch | run.describe(step, collected)
            run.save_rollouts(step, dealt, experience)
            clock.lap("time/save_rollouts_s")
            kl_coef = run.advantage_state.kl.coef
            metrics |= learner.update(experience, step=step, kl_coef=kl_coef)  # PPO epochs
            run.advantage_state = next_state
            clock.lap("time/update_s")

            metrics |= run.push_weights(learner, services, version=step)  # 6. versioned, verified
            clock.lap("time/push_weights_s")

            metrics |= run.evaluate_when_due(step, services)  # 7. held-out score,
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)  # checkpoint, policy,
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint)  # report

        return run.finish()


def collect(run: PPORun, services: Services, clock: Clock) -> Collected:
    """Generate and score this worker's share of a step, and again for what `ppo.filter` drops."""

    def scored_rollouts(num_prompts: int) -> list[ScoredRollout]:
        draws = run.draw_prompts(num_prompts)
        run.enter(Phase.GENERATE)
        rollouts = sample(draws, services.engine, run.tokenizer, run.sampling, run.push_again)
        clock.lap("time/generate_s")
        run.enter(Phase.SCORE)
        scored = judge(rollouts, run.judges(services), services.reference)
        clock.lap("time/score_s")
        return scored

    return fill_step(
        scored_rollouts,
        prompts_per_step=run.config.rollout.prompts_per_step,
        section=run.config.ppo.filter,
        reward=run.config.reward,
        workers=run.workers,
    )
