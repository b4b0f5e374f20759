"""Selection of the config class by a run file's recipe."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypo.config.base import ConfigError, read_yaml
from raypo.config.dpo_config import DPOConfig
from raypo.config.rounds_config import (
    DistillationConfig,
    IterativeDPOConfig,
    RejectionSamplingConfig,
)
from raypo.config.run_config import OnlineConfig, PPOConfig
from raypo.config.supervised_config import PolicyExamplesConfig, RewardModelConfig, SFTConfig

AnyConfig = OnlineConfig | PolicyExamplesConfig | RewardModelConfig
"""Config of any recipe."""

RECIPES: dict[str, type[AnyConfig]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "dpo": DPOConfig,
    "rejection_sampling": RejectionSamplingConfig,
    "distillation": DistillationConfig,
    "iterative_dpo": IterativeDPOConfig,
}
"""Config class of each recipe, by the recipe's name."""


def load_run_config(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[str] | None = None
) -> AnyConfig:
    """Load a run file of any recipe and apply overrides. The default recipe is ppo.

    Args:
        path: A YAML file, or the folder of a run.
        overrides: See `RunFile.load`.

    Raises:
        ConfigError: see `RunFile.load`; also if the recipe is unknown.
    """
    return parse_run_config(read_yaml(Path(path), overrides or {}), origin=str(path))


def parse_run_config(values: Mapping[str, Any], *, origin: str) -> AnyConfig:
    """Validate plain nested values of any recipe and return the config.

    Raises:
        ConfigError: see `load_run_config`.
    """
    if "space" in values and "base" in values:
        raise ConfigError(
            f"{origin}: this is a sweep, not a run. Start it with raypo sweep {origin}."
        )
    recipe = values.get("recipe", "ppo")
    if recipe not in RECIPES:
        similar = difflib.get_close_matches(str(recipe), RECIPES, n=1)
        hint = f"Did you mean {similar[0]}?" if similar else "Set recipe to one of them."
        raise ConfigError(f"{origin}: recipe ({recipe!r}): must be {', '.join(RECIPES)}. {hint}")
    return RECIPES[recipe].parse(values, origin=origin)
