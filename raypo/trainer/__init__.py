"""The trainers: one a recipe, each a Ray Train TorchTrainer."""

from __future__ import annotations

from typing import Any

from ray.train import RunConfig, ScalingConfig

from raypo.config import PPOConfig, RecipeConfig, RewardModelConfig, SFTConfig
from raypo.rewards.scoring import RewardFunction
from raypo.trainer.base import RecipeTrainer

__all__ = ["PPOTrainer", "RecipeTrainer", "RewardModelTrainer", "SFTTrainer", "trainer_for"]


# The loops are imported where they run: a driver that loads no models starts in two thirds of the
# time.


def _ppo(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.ppo import train_loop_per_worker

    return train_loop_per_worker(setup)


def _sft(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.sft import sft_loop_per_worker

    return sft_loop_per_worker(setup)


def _reward_model(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.reward_model import reward_model_loop_per_worker

    return reward_model_loop_per_worker(setup)


class PPOTrainer(RecipeTrainer[PPOConfig]):
    """PPO on a language model: `PPOTrainer(PPOConfig.load("ppo.yaml")).fit()`.

    A `ray.train.torch.TorchTrainer` with the same arguments and the same Result. What Python
    passes wins over the config, and the resolved config records it.
    """

    loop = _ppo

    def __init__(
        self,
        config: PPOConfig,
        *,
        reward_fn: RewardFunction | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **torch_trainer_arguments: Any,
    ) -> None:
        """As `RecipeTrainer`; `reward_fn` wins over `reward.function`."""
        super().__init__(
            config,
            reward_fn=reward_fn,
            scaling_config=scaling_config,
            run_config=run_config,
            **torch_trainer_arguments,
        )


class SFTTrainer(RecipeTrainer[SFTConfig]):
    """Supervised fine-tuning: `SFTTrainer(SFTConfig.load("sft.yaml")).fit()`."""

    loop = _sft


class RewardModelTrainer(RecipeTrainer[RewardModelConfig]):
    """A reward model from pairs: `RewardModelTrainer(RewardModelConfig.load(...)).fit()`."""

    loop = _reward_model


_TRAINERS: dict[type[RecipeConfig], type[RecipeTrainer[Any]]] = {
    PPOConfig: PPOTrainer,
    SFTConfig: SFTTrainer,
    RewardModelConfig: RewardModelTrainer,
}


def trainer_for(config: RecipeConfig, **arguments: Any) -> RecipeTrainer[Any]:
    """The trainer of a config's recipe, with the arguments that it takes."""
    return _TRAINERS[type(config)](config, **arguments)
