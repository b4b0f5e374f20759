"""The trainers: one a recipe, each a Ray Train TorchTrainer."""

from __future__ import annotations

from typing import Any

from raypo.config import PPOConfig, RecipeConfig, RewardModelConfig, SFTConfig
from raypo.trainer.trainer import RecipeTrainer

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
    """PPO on a language model: `PPOTrainer("ppo.yaml").fit()`."""

    loop = _ppo
    config_class = PPOConfig


class SFTTrainer(RecipeTrainer[SFTConfig]):
    """Supervised fine-tuning: `SFTTrainer("sft.yaml").fit()`."""

    loop = _sft
    config_class = SFTConfig


class RewardModelTrainer(RecipeTrainer[RewardModelConfig]):
    """A reward model from pairs: `RewardModelTrainer("reward_model.yaml").fit()`."""

    loop = _reward_model
    config_class = RewardModelConfig


_TRAINERS: dict[type[RecipeConfig], type[RecipeTrainer[Any]]] = {
    trainer.config_class: trainer for trainer in (PPOTrainer, SFTTrainer, RewardModelTrainer)
}


def trainer_for(config: RecipeConfig, **arguments: Any) -> RecipeTrainer[Any]:
    """The trainer of a config's recipe, with the arguments that it takes."""
    return _TRAINERS[type(config)](config, **arguments)
