"""The trainers: one a recipe, each a Ray Train TorchTrainer."""

from __future__ import annotations

from typing import Any

from raypo.config import (
    DistillationConfig,
    DPOConfig,
    IterativeDPOConfig,
    PPOConfig,
    RecipeConfig,
    RejectionSamplingConfig,
    RewardModelConfig,
    SFTConfig,
)
from raypo.trainer.trainer import RecipeTrainer

__all__ = [
    "DPOTrainer",
    "DistillationTrainer",
    "IterativeDPOTrainer",
    "PPOTrainer",
    "RecipeTrainer",
    "RejectionSamplingTrainer",
    "RewardModelTrainer",
    "SFTTrainer",
    "trainer_class",
    "trainer_for",
]


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


def _dpo(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.dpo import dpo_loop_per_worker

    return dpo_loop_per_worker(setup)


def _rejection_sampling(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.rejection_sampling import rejection_sampling_loop_per_worker

    return rejection_sampling_loop_per_worker(setup)


def _distillation(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.distillation import distillation_loop_per_worker

    return distillation_loop_per_worker(setup)


def _iterative_dpo(setup: dict[str, Any]) -> dict[str, Any]:
    from raypo.recipes.iterative_dpo import iterative_dpo_loop_per_worker

    return iterative_dpo_loop_per_worker(setup)


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


class DPOTrainer(RecipeTrainer[DPOConfig]):
    """A policy from preferences: `DPOTrainer("dpo.yaml").fit()`."""

    loop = _dpo
    config_class = DPOConfig


class RejectionSamplingTrainer(RecipeTrainer[RejectionSamplingConfig]):
    """The best of several samples, learned: `RejectionSamplingTrainer("run.yaml").fit()`."""

    loop = _rejection_sampling
    config_class = RejectionSamplingConfig


class DistillationTrainer(RecipeTrainer[DistillationConfig]):
    """A policy from a teacher's distributions: `DistillationTrainer("run.yaml").fit()`."""

    loop = _distillation
    config_class = DistillationConfig


class IterativeDPOTrainer(RecipeTrainer[IterativeDPOConfig]):
    """DPO on pairs of its own samples: `IterativeDPOTrainer("run.yaml").fit()`."""

    loop = _iterative_dpo
    config_class = IterativeDPOConfig


_TRAINERS: dict[type[RecipeConfig], type[RecipeTrainer[Any]]] = {
    trainer.config_class: trainer
    for trainer in (
        PPOTrainer,
        SFTTrainer,
        RewardModelTrainer,
        DPOTrainer,
        RejectionSamplingTrainer,
        DistillationTrainer,
        IterativeDPOTrainer,
    )
}


def trainer_class(config: RecipeConfig) -> type[RecipeTrainer[Any]]:
    """The trainer's class of a config's recipe."""
    return _TRAINERS[type(config)]


def trainer_for(config: RecipeConfig, **arguments: Any) -> RecipeTrainer[Any]:
    """The trainer of a config's recipe, with the arguments that it takes."""
    return trainer_class(config)(config, **arguments)
