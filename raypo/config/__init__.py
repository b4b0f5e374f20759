"""Every config class: frozen pydantic, torch-free."""

from raypo.config.base import Config, ConfigError, RunFile, flatten
from raypo.config.placement import DeploymentSection, FrozenSection, PlacementSection
from raypo.config.ppo import (
    CorrectionSection,
    FilterSection,
    KLSection,
    PPOSection,
    ShapingSection,
)
from raypo.config.presets import PRESETS
from raypo.config.recipes import RECIPES, load_run_config, parse_run_config
from raypo.config.rollout import EngineSection, RolloutSection, SamplingSection
from raypo.config.run import NUMBERS_DO_NOT_DEPEND_ON, PPOConfig, RecipeConfig
from raypo.config.sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    EvalSection,
    LearnerSection,
    LoggingSection,
    LoraSection,
    MLflowSection,
    ModelSection,
    PolicyLoraSection,
    RewardModelEntry,
    RewardSection,
    RewardWeights,
    WandbSection,
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
    "DeploymentSection",
    "EngineSection",
    "EvalSection",
    "ExamplesLearnerSection",
    "FilterSection",
    "FrozenSection",
    "KLSection",
    "LearnerSection",
    "LoggingSection",
    "LoraSection",
    "MLflowSection",
    "ModelSection",
    "PPOConfig",
    "PPOSection",
    "PairsSection",
    "PlacementSection",
    "PolicyLoraSection",
    "RecipeConfig",
    "ResponsesSection",
    "RewardModelConfig",
    "RewardModelEntry",
    "RewardSection",
    "RewardWeights",
    "RolloutSection",
    "RunFile",
    "SFTConfig",
    "SamplingSection",
    "ShapingSection",
    "TrainedModelSection",
    "WandbSection",
    "WorkersSection",
    "flatten",
    "load_run_config",
    "parse_run_config",
]
