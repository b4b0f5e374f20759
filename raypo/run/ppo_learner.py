"""Load policy and critic (step 3 of `raypo.recipes.ppo`), and return exports of trained models."""

from __future__ import annotations

from typing import Any

import torch

from raypo.config import PPOConfig
from raypo.learner.export import Export
from raypo.learner.learner import Learner
from raypo.learner.roles import Roles
from raypo.models.critic import critic_start
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run


def start_learner(
    run: Run[PPOConfig], inputs: OnlineInputs, roles: Roles, *, warms_up: bool
) -> Learner:
    """Load policy and critic, before `Checkpoints.restore` restores them. All workers call this.

    Args:
        run: The run.
        inputs: Inputs of the run.
        roles: Roles of the workers.
        warms_up: Whether to compile the kernels now, while the engines start. Only on GPUs.
    """
    config = run.config
    run.tell.phase(f"loading policy{' and critic' if config.needs_critic else ''}")
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
            has_other_judges=inputs.has_reward_function
            or bool(config.reward.url)
            or config.reward.judge is not None
            or config.rollout.is_episodic,
            normalizes=config.ppo.shaping.normalize,
        ),
        workers=run.workers,
        roles=roles,
    )
    if torch.cuda.is_available() and warms_up:
        run.tell.phase("compiling the learner's kernels")
        learner.warm_up()
    if start := run.workers.gather(learner.critic_start)[-1]:
        run.tell.message(f"critic: {start}")
    return learner


def exports_of(
    learner: Learner, config: PPOConfig, roles: Roles, tokenizer: Any
) -> dict[str, Export]:
    """Return an export of each model that this worker trains, by folder name.

    The models are the policy, its adapter if there is one, and the critic if `learner.save_critic`
    is set.
    """
    exports: dict[str, Export] = {}
    if roles.trains_policy:
        exports["policy"] = learner.policy_export(tokenizer)
        if config.model.lora:
            exports["adapter"] = learner.adapter_export()
    if roles.trains_critic and config.learner.save_critic:
        exports["critic"] = learner.critic_export(tokenizer)
    return exports
