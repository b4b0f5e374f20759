"""Public config classes: frozen pydantic models, without torch."""

from raypo.config.base import Config, ConfigError, flatten, is_import_path
from raypo.config.dpo_config import DPOConfig, DPOSection, PreferencesSection
from raypo.config.learner_section import (
    OVERLAPPED_STAGE,
    LearnerSection,
    WorkersSection,
)
from raypo.config.placement_section import FrozenSection, PlacementSection
from raypo.config.ppo_section import PPOSection
from raypo.config.ppo_subsections import (
    CorrectionSection,
    FilterSection,
    KLSection,
    ShapingSection,
)
from raypo.config.presets import PRESETS
from raypo.config.recipe_config import (
    RECIPES,
    AnyConfig,
    load_run_config,
    parse_run_config,
)
from raypo.config.reward_section import (
    Criterion,
    JudgeSection,
    RewardSection,
    RewardWeights,
)
from raypo.config.rollout_section import (
    EngineSection,
    InFlight,
    RolloutSection,
    SamplingSection,
    SpeculationSection,
)
from raypo.config.rounds_config import (
    DistillationConfig,
    DistillationSection,
    IterativeDPOConfig,
    RejectionSamplingConfig,
    RoundsConfig,
    SelectionSection,
)
from raypo.config.run_config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    OnlineConfig,
    PPOConfig,
    RecipeConfig,
)
from raypo.config.sections import (
    CheckpointSection,
    ClusterSection,
    CurriculumSection,
    DataSection,
    EvalSection,
    LoggingSection,
    LoraSection,
    MLflowSection,
    ModelSection,
    PolicyLoraSection,
    SampledModelSection,
    StopSection,
    TrainedModelSection,
    WandbSection,
)
from raypo.config.sources import PromptSource, SourceEntry, functions_of, source_name
from raypo.config.supervised_config import (
    ExamplesConfig,
    ExamplesLearnerSection,
    PairsSection,
    PolicyExamplesConfig,
    ResponsesSection,
    RewardModelConfig,
    SFTConfig,
)
