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
    from raypo.ppo.own import StepRewards, StepScores
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

__version__ = "0.1.0"

_HOMES = {
    name: home
    for home, names in {
        "raypo.config": "ConfigError DistillationConfig DPOConfig IterativeDPOConfig PPOConfig "
        "RejectionSamplingConfig RewardModelConfig SFTConfig",
        "raypo.ppo.own": "StepRewards StepScores",
        "raypo.ppo.surrogates": "TokenLoss Tokens",
        "raypo.recipes.ppo": "train_loop_per_worker",
        "raypo.rollout.interface": "Agent Environment",
        "raypo.run.callbacks": "StepView",
        "raypo.trainer": "DistillationTrainer DPOTrainer IterativeDPOTrainer PPOTrainer "
        "RejectionSamplingTrainer RewardModelTrainer SFTTrainer",
        "raypo.types": "Rollout",
    }.items()
    for name in names.split()
}
"""Public names, each imported when it is used, so that `import raypo` loads nothing heavy."""

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raypo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
