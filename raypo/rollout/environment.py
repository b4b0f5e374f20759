"""Environments of the user's: one object an episode, its calls limited in time and number."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from raypo.concurrency import daemon_future
from raypo.config import ConfigError, RolloutSection
from raypo.custom.loader import load_class
from raypo.data.turns import TurnTokens, is_ids
from raypo.rollout.environment_pool import EnvironmentPool, too_slow
from raypo.rollout.interface import ENVIRONMENT
from raypo.rollout.policy import EpisodeLimit, Policy
from raypo.types import Prompt


class WrongAnswer(Exception):
    """An environment returned what it must not."""


class Environments:
    """Plays episodes: the policy and an environment (`raypo.rollout.interface`) take turns.

    Plain methods run in threads, and with `rollout.environment_processes` all of them in processes.
    """

    def __init__(self, section: RolloutSection, tokens: TurnTokens) -> None:
        """Load the class, and start the processes where there are to be any.

        Raises:
            ConfigError: the class is missing or not what an environment must be.
        """
        load = partial(
            load_class,
            section.environment or "",
            ENVIRONMENT,
            section.environment_args,
            key="rollout.environment",
        )
        self._make = load()
        self._reads_ids = bool(getattr(self._make.func, "reads_token_ids", False))
        self._tools = getattr(self._make.func, "tools", None)
        if self._tools is not None and not isinstance(self._tools, list | tuple):
            raise ConfigError(
                f"rollout.environment ({section.environment}): its attribute tools is a "
                f"{type(self._tools).__name__}, and chat templates are told a list of functions "
                f"or of schemas. Make it one, or give it another name."
            )
        self._tokens, self._timeout_s = tokens, section.step_timeout_s
        self._pool: EnvironmentPool | None = None
        if section.environment_processes:
            self._pool = EnvironmentPool(
                load, processes=section.environment_processes, timeout_s=self._timeout_s
            )

    async def run(self, prompt: Prompt, policy: Policy, quota: asyncio.Semaphore) -> float:
        """One episode; the sum of its rewards.

        Raises:
            Exception: whatever the environment raises, TimeoutError where it took too long.
        """
        environment = _Environment(self._make, self._pool, self._timeout_s, quota)
        chat, ids = prompt.messages is not None, prompt.token_ids
        given = prompt.messages if chat else prompt.text
        first = await environment.call("reset", given, prompt.label)
        if first is None and chat and self._tools:
            first = prompt.messages  # tokenised without the tools
        if first is not None:
            chat = chat or not (isinstance(first, str) or is_ids(first))
            policy.prompt, ids = self._tokens.first(first, chat=chat, tools=self._tools)
        total = 0.0
        while True:
            try:
                reply = await policy.generate(ids, tools=self._tools)
            except EpisodeLimit:
                policy.is_cut_off = True
                break
            action = reply.token_ids.tolist() if self._reads_ids else reply.text
            observation, reward, done = _turn(await environment.call("step", action))
            policy.rows[-1].rewards[-1] = reward
            total += reward
            if done:
                break
            between = self._tokens.between(
                reply.token_ids, observation, chat=chat, tools=self._tools
            )
            ids = np.concatenate([reply.conversation, between])
        policy.metrics = metrics_of(environment)
        return total

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._pool:
            self._pool.close()


class _Environment:
    """One episode's environment, wherever it lives."""

    def __init__(
        self,
        make: partial[Any],
        pool: EnvironmentPool | None,
        timeout_s: float | None,
        quota: asyncio.Semaphore,
    ) -> None:
        self._make, self._pool, self._timeout_s, self._quota = make, pool, timeout_s, quota
        self._here: Any = None
        self._state: bytes | None = None
        self.metrics: Any = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """What its method returns.

        Raises:
            TimeoutError: it took too long. A thread cannot be ended, it goes on unheard.
        """
        async with self._quota:
            if self._pool:
                called = await self._pool.call(self._state, method, *arguments)
                self._state, answer, self.metrics = called
                return answer
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    return await self._call_here(method, *arguments)
            except TimeoutError:
                if not limit.expired():
                    raise  # one of its own
                raise too_slow(method, self._timeout_s) from None

    async def _call_here(self, method: str, *arguments: Any) -> Any:
        def call() -> Any:
            if self._here is None:
                self._here = self._make()
            return getattr(self._here, method)(*arguments)

        is_coroutine = inspect.iscoroutinefunction(getattr(self._make.func, method))
        answer = call() if is_coroutine else await in_thread(call)
        answer = await answer if inspect.isawaitable(answer) else answer
        self.metrics = getattr(self._here, "metrics", None)
        return answer


async def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in a thread that nobody waits for at the end: it may hang."""
    return await asyncio.wrap_future(daemon_future(function, name="raypo-episode"))


def metrics_of(player: Any) -> dict[str, float]:
    """The `metrics` of an environment or an agent, looked at."""
    metrics = getattr(player, "metrics", None)
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(
        isinstance(value, Real) and math.isfinite(value) for value in metrics.values()
    ):
        raise WrongAnswer(f"metrics is {metrics!r:.100}, not finite numbers by their names")
    return {str(name): float(value) for name, value in metrics.items()}


def _turn(answer: Any) -> tuple[Any, float, bool]:
    """What `step` returned, looked at."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise WrongAnswer(f"step returned {answer!r:.100}, not (observation, reward, done)")
    observation, reward, done = answer
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise WrongAnswer(f"step returned the reward {reward!r:.100}, not a finite number")
    if observation is None and not done:
        raise WrongAnswer("step returned no observation, and the episode is not done")
    return observation, float(reward), bool(done)
