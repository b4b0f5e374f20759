"""Checks that the user's functions and classes can be used, and that each response gets a score.

They import the user's files. `raypo.checks.input_checks` runs them in a process of its own.
"""

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
from raypo.custom.loader import load_class, load_function
from raypo.data.verifiers_environment import verifiers_factory
from raypo.extras import require
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL


def check_scoring(config: OnlineConfig, *, has_reward_fn: bool) -> None:
    """Refuse a config that scores no responses, or that names missing functions or classes."""
    check_functions(config, common=config.reward.function or has_reward_fn)
    if not has_reward_fn:
        _check_judged(config)
    serving = {
        "reward.url": config.reward.url,
        "reward.judge.url": config.reward.judge and config.reward.judge.url,
        "rollout.agent": config.rollout.agent,
        "rollout.environment": config.rollout.verifiers,
    }
    rollout = config.rollout
    for key in filter(serving.get, serving):
        require("serve", f"{key} ({serving[key]})")
    for key, spec in config.own_functions.items():
        load_function(spec, key=key)
    if rollout.verifiers is not None:
        key = "rollout.environment"
        verifiers_factory(rollout.verifiers, rollout.environment_args, key=key)
    for key, methods in (("environment", ENVIRONMENT), ("agent", AGENT)):
        if (spec := getattr(rollout, key)) is not None and rollout.verifiers is None:
            arguments = getattr(rollout, f"{key}_args")
            load_class(spec, methods, arguments, optional=OPTIONAL, key=f"rollout.{key}")


def _check_judged(config: OnlineConfig) -> None:
    """Refuse a config if nothing scores its responses.

    Distillation trains without scores, so only its held-out prompts need a reward function. With
    `distillation.teacher_prompt: success`, its training responses need scores too.
    """
    if config.reward.function is not None:
        load_function(config.reward.function, key="reward.function")
    reward = config.reward
    judges = reward.function or config.model.reward or reward.url or reward.judge
    if judges or functions_of(config.data.prompts) or config.rollout.is_episodic:
        return
    if not isinstance(config, DistillationConfig):
        raise ConfigError(
            "reward.function (None): nothing scores the responses. Set it to file.py:name or "
            "package.module:name, set model.reward, reward.url or reward.judge, or pass "
            "reward_funcs to the trainer."
        )
    if config.distillation.teacher_prompt == "success":
        raise ConfigError(
            "distillation.teacher_prompt (success): shows the teacher a sample that passed, but "
            "nothing scores the responses. Set reward.function, model.reward, reward.url or "
            "reward.judge."
        )
    if config.eval.prompts and not (config.eval.function or functions_of(config.eval.prompts)):
        raise ConfigError(
            "eval.function (None): no function scores the answers to eval.prompts. Set it to "
            "file.py:name or package.module:name, or remove eval.prompts."
        )


def check_functions(
    config: OnlineConfig | PolicyExamplesConfig, *, common: str | bool | None
) -> None:
    """Check the reward functions of sources and of evaluation.

    If some sources have reward functions, a source without one is refused unless `common` or
    `eval.function` applies to it.

    Args:
        config: The whole run config.
        common: Reward function of sources without one of their own; falsy if there is none.
    """
    trained, held_out = functions_of(config.data.prompts), functions_of(config.eval.prompts)
    for key, functions in (("data.prompts", trained), ("eval.prompts", held_out)):
        for spec in functions.values():
            load_function(spec, key=f"{key}.function")
    if config.eval.function is not None:
        load_function(config.eval.function, key="eval.function")
    if trained and not common:
        _require_functions("data.prompts", config.data.prompts, trained, "reward.function")
    if config.eval.function:
        return
    # A held-out episode keeps the score of its environment, unless eval names a function.
    plays = isinstance(config, OnlineConfig) and config.rollout.is_episodic
    having = held_out if plays else trained | held_out
    if having and (plays or not common):
        _require_functions("eval.prompts", config.eval.prompts or (), having, "eval.function")


def _require_functions(
    key: str, sources: Sequence[PromptSource], having: Mapping[str, str], common: str
) -> None:
    """Refuse a source without a reward function if other sources have one."""
    for source in sources:
        if source_name(source) not in having:
            raise ConfigError(
                f"{common} (None): some sources have their own function, but "
                f"{source_name(source)} of {key} has none. Give it one, or set {common}, which "
                "scores all sources without their own function."
            )
