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
from raypo.config.recipes import RECIPES, load_run_config, parse_run_config
from raypo.config.run import NUMBERS_DO_NOT_DEPEND_ON, PPOConfig, RecipeConfig
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
    RewardModelEntry,
    RewardSection,
    RolloutSection,
    SamplingSection,
    WorkersSection,
)
from raypo.config.supervised import (
    ExamplesLearnerSection,
    PairsSection,
    ResponsesSection,
    RewardModelConfig,
    SFTConfig,
    TrainedModelSection,
)

__all__ = [
    "NUMBERS_DO_NOT_DEPEND_ON",
    "PRESETS",
    "RECIPES",
    "CheckpointSection",
    "ClusterSection",
    "Config",
    "ConfigError",
    "CorrectionSection",
    "DataSection",
    "EngineSection",
    "EvalSection",
    "ExamplesLearnerSection",
    "FilterSection",
    "KLSection",
    "LearnerSection",
    "LoggingSection",
    "ModelSection",
    "PPOConfig",
    "PPOSection",
    "PairsSection",
    "PlacementSection",
    "RecipeConfig",
    "ResponsesSection",
    "RewardModelConfig",
    "RewardModelEntry",
    "RewardSection",
    "RolloutSection",
    "RunFile",
    "SFTConfig",
    "SamplingSection",
    "ShapingSection",
    "TrainedModelSection",
    "WorkersSection",
    "flatten",
    "load_run_config",
    "parse_run_config",
]
