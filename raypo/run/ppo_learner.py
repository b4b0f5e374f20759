"""Step 3 of PPO: load policy and critic, and the folders that they are written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypo.config import PPOConfig
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.models.critic import critic_start
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.run import Run


def start_learner(
    run: Run[PPOConfig], inputs: OnlineInputs, roles: Roles, phases: Phases
) -> Learner:
    """Load policy and critic; `Checkpoints.restore` restores them. All workers call it."""
    phases.enter(Phase.LEARN)
    run.tell.phase("loading policy and critic")
    config = run.config
    learner = Learner(
        config.model,
        config.ppo,
        config.learner,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_response_tokens,
        num_steps=config.num_steps,
        seed=config.seed,
        critic_start=critic_start(
            config.model,
            config.reward.weights,
            has_other_judges=inputs.reward_function is not None
            or bool(inputs.reward_servers)
            or config.rollout.environment is not None,
            normalizes=config.ppo.shaping.normalize,
        ),
        workers=run.workers,
        roles=roles,
    )
    phases.learner = learner
    if start := run.workers.gather(learner.critic_start)[-1]:
        run.tell.message(f"critic: {start}")
    return learner


def model_writers(
    learner: Learner, config: PPOConfig, roles: Roles, tokenizer: Any
) -> dict[str, Callable[[Path], None]]:
    """Return the models that this worker trains: policy, with LoRA its adapter, critic.

    The critic is written with `learner.save_critic` only.
    """
    writers: dict[str, Callable[[Path], None]] = {}
    if roles.trains_policy:
        writers["policy"] = lambda folder: learner.save_policy(folder, tokenizer)
        if config.model.lora:
            writers["adapter"] = learner.save_adapter
    if roles.trains_critic and config.learner.save_critic:
        writers["critic"] = lambda folder: learner.save_critic(folder, tokenizer)
    return writers
