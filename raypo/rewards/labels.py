"""Look up the function that checks the labels of a prompt source.

It depends on the reward function that scores the responses to these prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypo.config import (
    OnlineConfig,
    PolicyExamplesConfig,
    PromptSource,
    functions_of,
    source_name,
)
from raypo.rewards.verifiers import LABEL_CHECKS


def scorers_of(
    config: OnlineConfig | PolicyExamplesConfig, key: str, *, has_reward_fn: bool = False
) -> Callable[[PromptSource], str | None]:
    """Return a function that looks up the import path of a source's reward function.

    The lookup returns None if no function with an import path scores the source.

    Args:
        config: Config that names the reward functions.
        key: The config key of the sources: `data.prompts` or `eval.prompts`.
        has_reward_fn: True if a function was passed in Python. It replaces `reward.function`.
    """
    trained, held_out = functions_of(config.data.prompts), functions_of(config.eval.prompts)
    common = None
    if isinstance(config, OnlineConfig):
        common = None if has_reward_fn else config.reward.function
        if config.rollout.is_episodic:
            # Episodes have their own scores, unless eval names a function.
            trained, common = {}, None

    def scorer(source: PromptSource) -> str | None:
        name = source_name(source)
        function = trained.get(name, common)
        if key == "data.prompts":
            return function
        return held_out.get(name, config.eval.function or function)

    return scorer


def label_checks(
    config: OnlineConfig | PolicyExamplesConfig, key: str, *, has_reward_fn: bool = False
) -> Callable[[PromptSource], Callable[[Any, str], Any] | None]:
    """Return a function that looks up the check of a source's labels (`LABEL_CHECKS`).

    The lookup returns None if the source's reward function has no check. The arguments are the same
    as those of `scorers_of`.
    """
    scorer = scorers_of(config, key, has_reward_fn=has_reward_fn)
    return lambda source: LABEL_CHECKS.get(scorer(source) or "")
