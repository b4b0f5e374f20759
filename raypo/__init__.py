"""PPO and its family for language models on Ray Train, vLLM and DeepSpeed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypo.config import ConfigError, PPOConfig, RewardModelConfig, SFTConfig
    from raypo.recipes.ppo import train_loop_per_worker
    from raypo.trainer import PPOTrainer, RewardModelTrainer, SFTTrainer
    from raypo.types import Rollout

_HOMES = {
    "ConfigError": "raypo.config",
    "PPOConfig": "raypo.config",
    "PPOTrainer": "raypo.trainer",
    "RewardModelConfig": "raypo.config",
    "RewardModelTrainer": "raypo.trainer",
    "Rollout": "raypo.types",
    "SFTConfig": "raypo.config",
    "SFTTrainer": "raypo.trainer",
    "train_loop_per_worker": "raypo.recipes.ppo",
}

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "PPOConfig",
    "PPOTrainer",
    "RewardModelConfig",
    "RewardModelTrainer",
    "Rollout",
    "SFTConfig",
    "SFTTrainer",
    "train_loop_per_worker",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are used: `import raypo` loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raypo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
