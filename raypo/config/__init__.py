"""Every config class: frozen pydantic, torch-free."""

from raypo.config.base import Config, ConfigError, RunFile, flatten
from raypo.config.ppo import (
    CorrectionSection,
    FilterSection,
    KLSection,
    PPOSection,
    ShapingSection,
)
from raypo.config.presets import PRESETS
from raypo.config.run import NUMBERS_DO_NOT_DEPEND_ON, PPOConfig
from raypo.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EngineSection,
    EvalSection,
    LearnerSection,
    LoggingSection,
    ModelSection,
    PlacementSection,
    RewardSection,
    RolloutSection,
)

__all__ = [
    "NUMBERS_DO_NOT_DEPEND_ON",
    "PRESETS",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "ConfigError",
    "CorrectionSection",
    "DataSection",
    "EngineSection",
    "EvalSection",
    "FilterSection",
    "KLSection",
    "LearnerSection",
    "LoggingSection",
    "ModelSection",
    "PPOConfig",
    "PPOSection",
    "PlacementSection",
    "RewardSection",
    "RolloutSection",
    "RunFile",
    "ShapingSection",
    "flatten",
]
