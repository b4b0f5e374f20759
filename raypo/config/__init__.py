"""Every config class: frozen pydantic, torch-free."""

from raypo.config.base import Config, ConfigError, RunFile, flatten
from raypo.config.ppo import KLSection, PPOSection
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
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "ConfigError",
    "DataSection",
    "EngineSection",
    "EvalSection",
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
    "flatten",
]
