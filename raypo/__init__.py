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
    from raypo.ppo.surrogates import SurrogateInputs, TokenLoss
    from raypo.recipes.ppo import train_loop_per_worker
    from raypo.rollout.interface import Agent, Environment
    from raypo.run.callbacks import StepView
    from raypo.serving.ray_serve import llm_config
    from raypo.trainer import (
        DistillationTrainer,
        DPOTrainer,
        GRPOTrainer,
        IterativeDPOTrainer,
        PPOTrainer,
        RejectionSamplingTrainer,
        RewardModelTrainer,
        SFTTrainer,
    )
    from raypo.tuning.tuner import Tuner
    from raypo.types import Rollout

_HOMES = {
    "raypo.config": "ConfigError DPOConfig DistillationConfig IterativeDPOConfig PPOConfig "
    "RejectionSamplingConfig RewardModelConfig SFTConfig",
    "raypo.ppo.custom_functions": "StepRewards StepScores",
    "raypo.ppo.surrogates": "SurrogateInputs TokenLoss",
    "raypo.recipes.ppo": "train_loop_per_worker",
    "raypo.rollout.interface": "Agent Environment",
    "raypo.run.callbacks": "StepView",
    "raypo.serving.ray_serve": "llm_config",
    "raypo.trainer": "DPOTrainer DistillationTrainer GRPOTrainer IterativeDPOTrainer PPOTrainer "
    "RejectionSamplingTrainer RewardModelTrainer SFTTrainer",
    "raypo.tuning.tuner": "Tuner",
    "raypo.types": "Rollout",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__version__ = "0.2.0"
__all__ = [*_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import raypo` loads nothing heavy."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raypo' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
