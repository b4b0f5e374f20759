"""PPO and its family for language models on Ray Train, vLLM and DeepSpeed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypo.config import (
        ConfigError,
        DistillationConfig,
        DPOConfig,
        IterativeDPOConfig,
        PPOConfig,
        RejectionSamplingConfig,
        RewardModelConfig,
        SFTConfig,
    )
    from raypo.ppo.custom_functions import StepRewards, StepScores
    from raypo.ppo.surrogates import TokenLoss, Tokens
    from raypo.recipes.ppo import train_loop_per_worker
    from raypo.rollout.interface import Agent, Environment
    from raypo.run.callbacks import StepView
    from raypo.trainer import (
        DistillationTrainer,
        DPOTrainer,
        IterativeDPOTrainer,
        PPOTrainer,
        RejectionSamplingTrainer,
        RewardModelTrainer,
        SFTTrainer,
    )
    from raypo.types import Rollout

_HOMES = {
    "Agent": "raypo.rollout.interface",
    "ConfigError": "raypo.config",
    "DPOConfig": "raypo.config",
    "DPOTrainer": "raypo.trainer",
    "DistillationConfig": "raypo.config",
    "DistillationTrainer": "raypo.trainer",
    "Environment": "raypo.rollout.interface",
    "IterativeDPOConfig": "raypo.config",
    "IterativeDPOTrainer": "raypo.trainer",
    "PPOConfig": "raypo.config",
    "PPOTrainer": "raypo.trainer",
    "RejectionSamplingConfig": "raypo.config",
    "RejectionSamplingTrainer": "raypo.trainer",
    "RewardModelConfig": "raypo.config",
    "RewardModelTrainer": "raypo.trainer",
    "Rollout": "raypo.types",
    "SFTConfig": "raypo.config",
    "SFTTrainer": "raypo.trainer",
    "StepRewards": "raypo.ppo.custom_functions",
    "StepScores": "raypo.ppo.custom_functions",
    "StepView": "raypo.run.callbacks",
    "TokenLoss": "raypo.ppo.surrogates",
    "Tokens": "raypo.ppo.surrogates",
    "train_loop_per_worker": "raypo.recipes.ppo",
}

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "ConfigError",
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "Environment",
    "IterativeDPOConfig",
    "IterativeDPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RejectionSamplingConfig",
    "RejectionSamplingTrainer",
    "RewardModelConfig",
    "RewardModelTrainer",
    "Rollout",
    "SFTConfig",
    "SFTTrainer",
    "StepRewards",
    "StepScores",
    "StepView",
    "TokenLoss",
    "Tokens",
    "train_loop_per_worker",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: `import raypo` loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raypo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
