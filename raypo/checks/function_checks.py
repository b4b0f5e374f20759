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
from raypo.data.verifiers_environment import check_verifiers
from raypo.extras import require
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL


def check_scoring(config: OnlineConfig, *, has_reward_fn: bool) -> None:
    """Refuse a config without a reward function, and user functions or classes that are missing."""
    check_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    serving = {
        "reward.url": config.reward.url,
        "reward.judge": config.reward.judge and config.reward.judge.model,
        "rollout.agent": config.rollout.agent,
        "rollout.environment": config.rollout.verifiers,
    }
    rollout = config.rollout
    for key in filter(serving.get, serving):
        require("serve", f"{key} ({serving[key]})")
    for key, spec in config.own_functions.items():
        check_function(spec, key=key)
    if rollout.verifiers is not None:
        key = "rollout.environment"
        check_verifiers(rollout.verifiers, rollout.environment_args, key=key)
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(rollout, key)) is not None and rollout.verifiers is None:
            arguments = getattr(rollout, f"{key}_args")
            check_class(spec, methods, arguments, optional=OPTIONAL, key=f"rollout.{key}")


def _check_judged(config: OnlineConfig) -> None:
    """Refuse responses that no reward function scores.

    Distillation needs no reward function for training, but one for held-out prompts.
    """
    if config.reward.function is not None:
        check_function(config.reward.function)
    reward = config.reward
    judges = reward.function or config.model.reward or reward.url or reward.judge
    if judges or functions_of(config.data.prompts) or config.rollout.is_episodic:
        return
    if not isinstance(config, DistillationConfig):
        raise ConfigError(
            "reward.function (None): nothing judges the responses. Set it to file.py:name or "
            "package.module:name, set model.reward, reward.url or reward.judge, or pass reward_fn "
            "to the trainer."
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
