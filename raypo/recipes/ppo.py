"""PPO in seven steps: the loop that every learner worker runs on its own share of the prompts.

If the run has a driver (`raypo.trainer`), step 1 and the dedicated services of step 2 are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.data.stream import Draw
from raypo.learner.learner import Learner
from raypo.metrics.clock import Clock
from raypo.ppo.controllers import ReferenceKL, UpdateState
from raypo.ppo.corrections import mismatch_metrics, with_corrections
from raypo.ppo.covariance import with_covariant_tokens
from raypo.ppo.estimators import with_advantages
from raypo.rollout.collect import sample
from raypo.rollout.sharding import shard, to_experience
from raypo.run.phases import Phase
from raypo.run.ppo_run import PPORun
from raypo.run.run import open_run
from raypo.run.services import Services
from raypo.types import Experience, ScoredRollout


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run PPO on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a PPOConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed step}`.
    """
    with open_run(setup, PPORun) as run:
        config, workers, seed = run.config, run.workers, run.config.seed
        services = run.start_services()  # 2. engines, reference and reward models
        learner = run.start_learner()  # 3. policy and critic, restored if there is a checkpoint
        run.push_weights(learner, services, version=run.last_step)
        run.evaluate_before_first_update(services)
        run.rollouts.begin(
            partial(generate_and_score, run, services), run.fill, last_step=run.last_step
        )

        for step in run.steps():
            clock = Clock()
            collected = run.rollouts.take(step, clock)  # 4. `generate_and_score`, below
            dealt = shard(
                collected.trained,
                minibatch_size=config.ppo.minibatch_size,
                seed=(seed, step),
                workers=workers,
                teams=run.roles.teams,
            )
            run.enter(Phase.LEARN)
            with run.keeping(step, dealt):  # 5. advantages, PPO epochs: `ppo_step`, below
                experience, metrics, run.update_state = ppo_step(
                    learner,
                    to_experience(dealt),
                    config.ppo,
                    run.update_state,
                    run.roles.own,
                    max_new_tokens=config.rollout.max_response_tokens,
                    step=step,
                    clock=clock,
                )
            metrics |= run.describe(step, collected)
            run.save_rollouts(step, dealt, experience)
            clock.lap("time/save_rollouts_s")

            metrics |= run.push_weights(learner, services, version=step)  # 6. versioned, verified
            clock.lap("time/push_weights_s")

            metrics |= run.evaluate_when_due(step, services)  # 7. held-out score,
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)  # checkpoint, models,
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint)  # report

        return run.finish()


def ppo_step(
    learner: Learner,
    experience: Experience,
    ppo: PPOSection,
    state: UpdateState,
    workers: Workers,
    *,
    max_new_tokens: int,
    step: int,
    clock: Clock,
) -> tuple[Experience, dict[str, float], UpdateState]:
    """Run one step's update on this worker's share of the experience; all workers call it.

    Args:
        learner: Policy and critic.
        experience: This worker's share of the step.
        ppo: The section `ppo` of the config.
        state: State that the previous step returned: coefficients and moments of scores.
        workers: Workers that train the same model as this one. Together they hold each sample of
            the step once.
        max_new_tokens: Longest response, in tokens.
        step: Counted from 1.
        clock: Records the time of each part.

    Returns:
        experience: The experience with everything that the update computed.
        metrics: Metrics of the step over all workers.
        state: State for the next step.
    """
    experience = learner.with_log_probs_and_values(experience)  # old log-probs, values
    clock.lap("time/log_probs_s")
    experience, metrics, score_moments = with_advantages(
        experience, ppo, state, workers, max_new_tokens=max_new_tokens, step=step
    )
    # Step n updates the weights of version n - 1, those that step n - 1 pushed.
    experience = with_corrections(experience, ppo.correction, version=step - 1)
    experience = with_covariant_tokens(experience, ppo, workers, seed=learner.seed, step=step)
    experience, update = learner.update(
        experience, step=step, kl_coef=state.kl.coef, entropy_coef=state.entropy.acting
    )
    kl = ReferenceKL.measure(experience, workers) if ppo.needs_reference else None
    next_state = state.after_step(
        scores=score_moments,
        # The KL coefficient waits for the policy, which the critic's warm-up does not update.
        kl=kl if step > ppo.critic_warmup_steps else None,
        entropy=update.entropy,
    )
    metrics |= kl.metrics() if kl else {}
    metrics |= mismatch_metrics(experience, ppo, workers, version=step - 1)
    clock.lap("time/update_s")
    return experience, metrics | update.metrics | state.metrics(), next_state


def generate_and_score(
    run: PPORun, services: Services, draws: Sequence[Draw], clock: Clock, workers: Workers
) -> list[ScoredRollout]:
    """Sample responses to this worker's draws; add their scores and reference log-probs.

    Called once for a step's prompts, and again to replace groups that `ppo.filter` drops. In the
    asynchronous modes background threads call it, each with its own clock and process group.
    """
    run.enter(Phase.GENERATE)
    scoring = run.scoring(services)
    rollouts = sample(
        draws,
        run.engines(services),
        run.tokenizer,
        run.sampling,
        run.push_again,
        dispatcher=run.dispatcher(services, workers),
        on_rollouts=scoring.add if scoring.scores_early else None,  # score while others are sampled
    )
    clock.lap("time/generate_s")
    run.enter(Phase.SCORE, before_push=not run.config.is_refilled)
    scored = scoring.results(rollouts)
    clock.lap("time/score_s")
    return scored
