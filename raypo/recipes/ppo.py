"""PPO in seven steps: the loop that every learner worker runs.

If the run has a driver (`raypo.trainer`), the driver runs step 1: the checks before the workers
start. It also starts the dedicated services of step 2.

`run_steps` calls `train_step` in each step, and does the work that all recipes share.

Concurrency: the main thread of every worker runs the code below sequentially. In the first worker's
process, the rollout controller (`raypo.rollout.controller`) produces the batches. It starts a batch
when the loop requests it or, with a `rollout.mode` other than sync, ahead of the request.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.metrics.clock import Clock
from raypo.ppo.controllers import ReferenceKL, UpdateState
from raypo.ppo.corrections import mismatch_metrics, with_corrections
from raypo.ppo.covariance import with_covariant_tokens
from raypo.ppo.estimators import with_advantages
from raypo.ppo.high_entropy import with_high_entropy_tokens
from raypo.rollout.sharding import to_experience
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.ppo_learner import exports_of, start_learner
from raypo.run.records import Records
from raypo.run.rollout_metrics import rollout_rows
from raypo.run.rollouts import Rollouts
from raypo.run.run import open_run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import start_services
from raypo.run.steps import StepResult, run_steps
from raypo.run.utilization import Utilization, slowest_worker
from raypo.run.weight_pusher import WeightPusher
from raypo.types import Experience


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run PPO on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a PPOConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed step}`.
    """
    with open_run(setup) as run:
        config = run.config
        utilization = Utilization.measure(config, run.workers)
        inputs = OnlineInputs.load(run)  # 2. prompts, tokenizer, reward function
        services = start_services(run)  # engines, reference and reward models
        records = Records(run)
        section = config.learner
        roles = Roles.of(run.workers, section.critic_workers, section.sequence_parallel)
        phases = Phases.of(run, services)
        weight_pusher = WeightPusher(run, inputs, services, phases, roles)
        rollouts = Rollouts(run, records, inputs, services, phases, weight_pusher)
        phases.enter(Phase.LEARN)
        # If roles start at the same time, the engine compiles meanwhile and takes longer.
        learner = start_learner(run, inputs, roles, warms_up=not phases.offloads)  # 3. the models
        phases.learner = learner
        checkpoints = Checkpoints(
            run,
            records,
            learner,
            roles.own,
            exports_of(learner, config, roles, inputs.tokenizer),
            rollouts,
            before_saving=partial(phases.enter, Phase.LEARN),
        )
        saved_state = checkpoints.restore()  # empty if there is no checkpoint
        state = UpdateState.initial(config.ppo).restored(
            saved_state["advantages"] if saved_state else None
        )
        weight_pusher.push_first(learner, version=records.last_step)
        rollouts.evaluate_initial()
        rollouts.begin(last_step=records.last_step)

        def train_step(step: int, clock: Clock) -> StepResult:
            nonlocal state
            batch = rollouts.take(step, clock)  # 4. sample, score and filter
            share = rollouts.deal(batch, step, minibatch_size=config.ppo.minibatch_size)
            phases.enter(Phase.LEARN)
            # Only workers that train the policy write samples. Together they hold each sample once.
            with records.keeping(step, share if roles.writes_samples else []):
                # 5. advantages, PPO epochs: `ppo_step`, below
                experience, metrics, state = ppo_step(
                    learner,
                    to_experience(share, parts=config.ppo.part_names),
                    config.ppo,
                    state,
                    roles.data,
                    max_new_tokens=config.rollout.max_response_tokens,
                    step=step,
                    clock=clock,
                )
            metrics |= rollouts.metrics(batch, step)
            records.write_samples(
                step, partial(rollout_rows, share, experience) if roles.writes_samples else list
            )
            clock.lap("time/save_rollouts_s")

            metrics |= rollouts.settle()
            metrics |= weight_pusher.push(
                learner, version=step
            )  # 6. push the weights, versioned and verified
            rollouts.arrived(step)
            clock.lap("time/push_weights_s")

            return StepResult(
                metrics,
                {"advantages": state.state_dict()},
                samples=batch.scored,
                rates=utilization.rates(batch, services, step=step),
                spans=rollouts.spans,
            )

        # 7. held-out score, callbacks, stop rules, checkpoint and models, report
        run_steps(run, records, checkpoints, train_step, rollouts.evaluate)
        if records.stopped:
            rollouts.report_unused()
        return records.finish()


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
        workers: Workers that train the same model as this one and together hold each sample of the
            step once.
        max_new_tokens: Longest response, in tokens.
        step: Step number, from 1.
        clock: Clock that records the time of each part.

    Returns:
        experience: The experience with the tensors that the update computed.
        metrics: Metrics of the step over all workers.
        state: State for the next step.
    """
    experience = learner.with_log_probs_and_values(experience)  # old log-probs, values
    metrics = slowest_worker(clock.lap("time/log_probs_s"), experience, workers)
    experience, of_advantages, score_moments = with_advantages(
        experience, ppo, state, workers, max_new_tokens=max_new_tokens, step=step
    )
    # Step n starts from the weights of version n - 1, which step n - 1 pushed.
    experience = with_corrections(experience, ppo.correction, version=step - 1)
    experience = with_covariant_tokens(experience, ppo, workers, seed=learner.seed, step=step)
    experience, entropy_metrics = with_high_entropy_tokens(experience, ppo, workers)
    experience, update = learner.update(
        experience, step=step, kl_coef=state.kl.coef, entropy_coef=state.entropy.acting
    )
    kl = ReferenceKL.measure(experience, workers) if ppo.needs_reference else None
    next_state = state.after_step(
        scores=score_moments,
        # The critic's warm-up does not update the policy, so the KL coefficient does not change.
        kl=kl if step > ppo.critic_warmup_steps else None,
        entropy=update.entropy,
    )
    metrics |= of_advantages | entropy_metrics | (kl.metrics() if kl else {})
    metrics |= mismatch_metrics(experience, ppo, workers, version=step - 1)
    clock.lap("time/update_s")
    return experience, metrics | update.metrics | state.metrics(), next_state
