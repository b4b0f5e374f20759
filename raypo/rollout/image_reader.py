"""What a run with images needs of its config, and the reader of its images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from raypo.config import AnyConfig, ConfigError, OnlineConfig
from raypo.data.images import ImageReader
from raypo.models.checkpoint import read_config
from raypo.models.model_files import VISION
from raypo.models.vision import placeholder_id


def image_reader(config: AnyConfig, policy: str) -> ImageReader:
    """Return the reader of a policy's images.

    Args:
        config: The run's config.
        policy: Folder or hub id of the policy.

    Raises:
        ConfigError: the run cannot have images (`check_images`), or the policy has no processor.
    """
    check_images(config, policy)
    token = placeholder_id(read_config(policy))
    assert token is not None, "the policy reads images"
    return ImageReader(policy, placeholder_id=token)


def check_images(config: AnyConfig, policy: str) -> None:
    """Refuse images in the prompts of a run that cannot have them.

    Raises:
        ConfigError: a model of the run reads no images, or a setting does not allow them.
    """
    for problem in _problems(config, policy):
        raise ConfigError(problem)


def _problems(config: AnyConfig, policy: str) -> Iterator[str]:
    kind = read_config(policy, key="model.policy").model_type
    if kind not in VISION:
        yield (
            f"data.image_key ({config.data.image_key}): prompts have images, but model.policy "
            f"({policy}), of the architecture {kind}, reads none. Remove the images, or give a "
            f"model of one of these architectures: {', '.join(VISION)}."
        )
    learner, model = config.learner, config.model
    if model.attention != "auto":
        yield f"model.attention ({model.attention}): prompts with images need auto. Remove it."
    if learner.num_workers > 1 and (learner.zero_stage == 3 or not model.freeze):
        key = "learner.zero_stage (3)" if learner.zero_stage == 3 else "model.freeze ([])"
        yield (
            f"{key}: with several workers, prompts with images need a frozen vision tower that "
            "each worker holds. Set learner.zero_stage to 2 or less, and leave model.freeze out."
        )
    if isinstance(config, OnlineConfig):
        yield from _problems_of_models(config)
        yield from _problems_of_rollouts(config)


def _problems_of_models(config: OnlineConfig) -> Iterator[str]:
    model: Any = config.model
    for name in ("critic", "reference", "teacher"):
        path = getattr(model, name, None)
        if isinstance(path, str) and read_config(path).model_type not in VISION:
            yield (
                f"model.{name} ({path}): prompts have images, which this model does not read. Give "
                "one that does, like the policy itself."
            )
    if model.reward:
        yield (
            f"model.reward ({model.reward[0].path}): prompts have images, which reward models do "
            "not see. Score the responses by reward.function or reward.judge."
        )
    if getattr(model, "reference", None) and config.placement.frozen.reference.backend != "torch":
        yield (
            f"placement.frozen.reference.backend ({config.placement.frozen.reference.backend}): "
            "the reference gets no images there. Set it to torch."
        )


def _problems_of_rollouts(config: OnlineConfig) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine.speculation.kind != "none":
        yield (
            f"rollout.engine.speculation.kind ({rollout.engine.speculation.kind}): while vLLM "
            "speculates, it cannot exclude the placeholders of images. Set it to none."
        )
    if rollout.is_episodic:
        name = "environment" if rollout.environment else "agent"
        yield (
            f"rollout.{name} ({getattr(rollout, name)}): episodes get no images. Remove the "
            "images, or score single responses by reward.function."
        )
