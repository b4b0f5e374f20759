"""Checks of a run whose prompts have images: models, engines and forms of rows."""

from __future__ import annotations

from typing import Any

from raypo.checks.model_checks import JUDGE, models_of
from raypo.config import (
    AnyConfig,
    ConfigError,
    DistillationConfig,
    OnlineConfig,
    RewardModelConfig,
)
from raypo.models.model_files import VISION, VISION_OF_ENGINES


def check_images(config: AnyConfig) -> None:
    """Refuse a run whose prompts have images, if one of its models could not read them.

    Raises:
        ConfigError: a model that reads the prompts' token ids has no vision tower that raypo reads
            images with, or the learner could not pass images.
    """
    from raypo.models.checkpoint import read_config

    model, learner = config.model, config.learner
    for key, path in models_of(config):
        kind = read_config(path, key=key).model_type
        reads_text = key == "model.reward" or isinstance(config, RewardModelConfig)
        reads_text = reads_text or isinstance(config, DistillationConfig)
        if key == JUDGE or (kind in VISION and not reads_text):
            continue
        why = "as a classifier or a teacher" if reads_text else f"of the architecture {kind}"
        raise ConfigError(
            f"{key} ({path}): the prompts have images, but raypo reads no images with a model "
            f"{why}. Give a policy, reference and critic of {', '.join(VISION)}, or prompts "
            "without images."
        )
    if model.attention != "auto":
        raise ConfigError(
            f"model.attention ({model.attention}): images are read in packed rows only. Set it to "
            "auto."
        )
    if learner.sequence_parallel > 1:
        raise ConfigError(
            f"learner.sequence_parallel ({learner.sequence_parallel}): workers cannot share the "
            "tokens of rows with images. Set it to 1."
        )
    if "vision" not in model.freeze and learner.total_workers > 1:
        raise ConfigError(
            f"model.freeze ({list(model.freeze)}): a vision tower is trained by one learner worker "
            f"only, because a worker may have no images, but there are {learner.total_workers} "
            "workers. Set it to [vision]."
        )
    if config.needs_engine:
        _check_engine_with_images(config)
    if isinstance(config, OnlineConfig):
        _check_rollouts_with_images(config)
    for key, value in {
        "data.messages_key": getattr(config.data, "messages_key", None),
        "data.desirable_key": getattr(config.data, "desirable_key", None),
        "dpo.loss": "kto" if getattr(getattr(config, "dpo", None), "loss", None) == "kto" else None,
    }.items():
        if value is not None:
            raise ConfigError(
                f"{key} ({value}): examples of this form get no images, but data.image_key is "
                f"{config.data.image_key}. Give prompts with responses, or pairs for another loss."
            )


def _check_engine_with_images(config: Any) -> None:
    """Refuse a policy whose images the engines do not read, or not with its latest weights."""
    from raypo.models.checkpoint import read_config

    model = config.model
    kind = read_config(model.policy).model_type
    remedy = ", or train by a recipe without an engine (sft, dpo)"
    if not isinstance(config, OnlineConfig):
        remedy = ", or sample no responses for evaluation (eval.function)"
    if kind not in VISION_OF_ENGINES:
        raise ConfigError(
            f"model.policy ({model.policy}): the prompts have images, but no engine was compared "
            f"with the learner on images for the architecture {kind}. Give a policy of "
            f"{', '.join(VISION_OF_ENGINES)}{remedy}."
        )
    if "vision" not in model.freeze:
        raise ConfigError(
            f"model.freeze ({list(model.freeze)}): vLLM keeps what a vision tower has made of an "
            "image across pushes, so its engines would use vectors of an older tower. Set it to "
            f"[vision]{remedy}."
        )


def _check_rollouts_with_images(config: OnlineConfig) -> None:
    """Refuse settings of rollouts that images do not reach."""
    rollout, frozen = config.rollout, config.placement.frozen
    if rollout.is_episodic:
        name = "environment" if rollout.environment else "agent"
        raise ConfigError(
            f"rollout.{name} ({getattr(rollout, name)}): episodes get no images, but "
            f"data.image_key is {config.data.image_key}. Remove one of the two."
        )
    # Also if the reference is the initial policy, whose model.reference is null.
    if config.references and frozen.reference.backend != "torch":
        raise ConfigError(
            f"placement.frozen.reference.backend ({frozen.reference.backend}): the reference gets "
            "no images there. Set it to torch."
        )
