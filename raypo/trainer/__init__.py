"""Trainers, one per recipe. Each is a Ray Train TorchTrainer."""

from __future__ import annotations

from typing import Any, ClassVar

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


class PPOTrainer(RecipeTrainer[PPOConfig]):
    """PPO on a language model: `PPOTrainer("ppo.yaml").fit()`."""

    config_class = PPOConfig


class GRPOTrainer(PPOTrainer):
    """PPOTrainer with `ppo.preset: grpo`, unless `ppo.preset` or `ppo.advantage` is given."""

    preset: ClassVar[str | None] = "grpo"


class SFTTrainer(RecipeTrainer[SFTConfig]):
    """Supervised fine-tuning: `SFTTrainer("sft.yaml").fit()`."""

    config_class = SFTConfig


class RewardModelTrainer(RecipeTrainer[RewardModelConfig]):
    """Reward-model training on pairs: `RewardModelTrainer("reward_model.yaml").fit()`."""

    config_class = RewardModelConfig


class DPOTrainer(RecipeTrainer[DPOConfig]):
    """DPO and its variants on preference pairs: `DPOTrainer("dpo.yaml").fit()`."""

    config_class = DPOConfig


class RejectionSamplingTrainer(RecipeTrainer[RejectionSamplingConfig]):
    """Fine-tuning on the best of several samples: `RejectionSamplingTrainer("run.yaml").fit()`."""

    config_class = RejectionSamplingConfig


class DistillationTrainer(RecipeTrainer[DistillationConfig]):
    """Distillation from a teacher's distributions: `DistillationTrainer("run.yaml").fit()`."""

    config_class = DistillationConfig


class IterativeDPOTrainer(RecipeTrainer[IterativeDPOConfig]):
    """DPO on pairs of the policy's own samples: `IterativeDPOTrainer("run.yaml").fit()`."""

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


def trainer_for(config: RecipeConfig, **arguments: Any) -> RecipeTrainer[Any]:
    """Create the trainer of a config's recipe.

    Args:
        config: The run config.
        arguments: Keyword arguments of `RecipeTrainer`.
    """
    return _TRAINERS[type(config)](config, **arguments)
