"""Checks of the user's functions and classes: they exist, and each response has a score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypo.config import (
    ConfigError,
    DistillationConfig,
    OnlineConfig,
    PolicyExamplesConfig,
    PromptSource,
    functions_of,
    source_name,
)
from raypo.custom.loader import check_class, check_function
from raypo.extras import require
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL


def check_scoring(config: OnlineConfig, *, has_reward_fn: bool) -> None:
    """Refuse a config without a reward function, and user functions or classes that are missing."""
    check_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    serving = {"reward.url": config.reward.url, "rollout.agent": config.rollout.agent}
    for key in filter(serving.get, serving):
        require("serve", f"{key} ({serving[key]})")
    for key, spec in config.own_functions.items():
        check_function(spec, key=key)
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(config.rollout, key)) is not None:
            arguments = getattr(config.rollout, f"{key}_args")
            check_class(spec, methods, arguments, optional=OPTIONAL, key=f"rollout.{key}")


def _check_judged(config: OnlineConfig) -> None:
    """Refuse responses that no reward function scores.

    Distillation needs no reward function for training, but one for held-out prompts.
    """
    if config.reward.function is not None:
        check_function(config.reward.function)
    judges = config.reward.function or config.model.reward or config.reward.url
    if judges or functions_of(config.data.prompts) or config.rollout.is_episodic:
        return
    if not isinstance(config, DistillationConfig):
        raise ConfigError(
            "reward.function (None): nothing judges the responses. Set it to file.py:name or "
            "package.module:name, set model.reward or reward.url, or pass reward_fn to the "
            "trainer."
        )
    if config.distillation.teacher_prompt == "success":
        raise ConfigError(
            "distillation.teacher_prompt (success): shows a sample that passes, and nothing judges "
            "the responses. Set reward.function, model.reward or reward.url."
        )
    if config.eval.prompts and not (config.eval.function or functions_of(config.eval.prompts)):
        raise ConfigError(
            "eval.function (None): nobody judges the answers to eval.prompts. Set it to "
            "file.py:name or package.module:name, or remove eval.prompts."
        )


def check_functions(
    config: OnlineConfig | PolicyExamplesConfig, *, common: str | bool | None
) -> None:
    """Check the functions of single sources and of evaluation, and refuse a source without one.

    Args:
        config: The whole run config.
        common: Reward function of all sources without their own; falsy if there is none.
    """
    trained, held_out = functions_of(config.data.prompts), functions_of(config.eval.prompts)
    for key, functions in (("data.prompts", trained), ("eval.prompts", held_out)):
        for spec in functions.values():
            check_function(spec, key=f"{key}.function")
    if config.eval.function is not None:
        check_function(config.eval.function, key="eval.function")
    if trained and not common:
        _require_functions("data.prompts", config.data.prompts, trained, "reward.function")
    if config.eval.function:
        return
    # Held-out episodes have their own scores, unless eval names functions.
    plays = isinstance(config, OnlineConfig) and config.rollout.is_episodic
    having = held_out if plays else trained | held_out
    if having and (plays or not common):
        _require_functions("eval.prompts", config.eval.prompts or (), having, "eval.function")


def _require_functions(
    key: str, sources: Sequence[PromptSource], having: Mapping[str, str], common: str
) -> None:
    """Refuse a source without a reward function if others have their own."""
    for source in sources:
        if source_name(source) not in having:
            raise ConfigError(
                f"{common} (None): sources have functions of their own, and {source_name(source)} "
                f"of {key} has none. Give it one, or set {common}, which judges all sources that "
                f"have none."
            )
