"""Players of an episode: the user's environment or agent, which drives the policy."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raypo.config import ConfigError, RolloutSection
from raypo.custom.loader import load_class
from raypo.data.turns import TurnTokens, is_ids
from raypo.rollout.environment_pool import EnvironmentPool, Pickled
from raypo.rollout.interface import AGENT, ENVIRONMENT, OPTIONAL
from raypo.rollout.policy import EpisodeLimit, Policy, is_limit
from raypo.rollout.work_time import WorkTime
from raypo.types import Prompt

if TYPE_CHECKING:
    from raypo.rollout.sessions import Sessions


class WrongAnswer(Exception):
    """An environment or an agent returned an invalid value."""


class Player(Protocol):
    """Runs the episodes of a worker with the user's class."""

    def begin(self) -> UsersObject:
        """Return the user's object for one episode."""
        ...

    async def run(self, it: UsersObject, prompt: Prompt, policy: Policy) -> float:
        """Run one episode and return its score. An exception fails the episode."""
        ...

    def close(self) -> None:
        """End the processes or the server that it has started."""
        ...


class UsersObject:
    """One episode's environment or agent, with a time limit and a quota for its calls.

    The object is created by its first call. Coroutines run in the event loop, and plain methods in
    threads. With a pool all methods run in processes.
    """

    def __init__(
        self,
        make: partial[Any],
        quota: asyncio.Semaphore,
        limit_s: float | None,
        pool: EnvironmentPool | None = None,
    ) -> None:
        self._make, self._quota, self._limit_s, self._pool = make, quota, limit_s, pool
        self._here: Any = None
        self._in_pool = Pickled()

    def metrics(self) -> dict[str, float]:
        """Return the object's attribute `metrics`; empty if it has none.

        Raises:
            WrongAnswer: the attribute is not a mapping of names to finite numbers.
        """
        metrics = self._in_pool.metrics if self._pool else getattr(self._here, "metrics", None)
        if metrics is None:
            return {}
        if not isinstance(metrics, Mapping) or not all(
            isinstance(value, Real) and math.isfinite(value) for value in metrics.values()
        ):
            raise WrongAnswer(f"metrics is {metrics!r:.100}, not finite numbers by their names")
        return {str(name): float(value) for name, value in metrics.items()}

    def time_for(self, method: str) -> WorkTime:
        """Return quota and time limit of one call. With a pool, the pool measures the time."""
        return WorkTime(method, self._quota, None if self._pool else self._limit_s)

    async def call(self, method: str, *arguments: Any, time: WorkTime | None = None) -> Any:
        """Call a method and return its result.

        Args:
            method: Name of the method.
            arguments: Its arguments.
            time: Quota and time limit. None means those of `time_for`.

        Raises:
            TimeoutError: the call took too long. If it runs in a thread, it goes on, and its
                result is ignored.
            Exception: any error of the method.
        """
        time = time or self.time_for(method)
        return await time.over(partial(self._called, method, *arguments))

    async def close(self) -> None:
        """Call the object's `close`, if it was created and has one."""
        is_made = self._here is not None or self._in_pool.state is not None
        if is_made and hasattr(self._make.func, "close"):
            await self.call("close")

    async def _called(self, method: str, *arguments: Any) -> Any:
        if self._pool:
            return await self._pool.call(self._in_pool, method, *arguments)

        def call() -> Any:
            if self._here is None:
                self._here = self._make()
            return getattr(self._here, method)(*arguments)

        is_coroutine = inspect.iscoroutinefunction(getattr(self._make.func, method))
        answer = call() if is_coroutine else await asyncio.to_thread(call)
        return await answer if inspect.isawaitable(answer) else answer


class Environments:
    """Player of environments (`raypo.rollout.interface`), which alternate with the policy."""

    def __init__(self, section: RolloutSection, tokens: TurnTokens) -> None:
        """Load the class, and start `rollout.environment_processes` processes.

        Raises:
            ConfigError: the class is missing or is not an environment.
        """
        load = partial(
            load_class,
            section.environment or "",
            ENVIRONMENT,
            section.environment_args,
            optional=OPTIONAL,
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
        self._tokens, self._limit_s = tokens, section.step_timeout_s
        self._quota = asyncio.Semaphore(section.max_concurrent_steps)
        self._pool: EnvironmentPool | None = None
        if section.environment_processes:
            self._pool = EnvironmentPool(
                load, processes=section.environment_processes, timeout_s=self._limit_s
            )

    def begin(self) -> UsersObject:
        """Return the environment of one episode, not created yet."""
        return UsersObject(self._make, self._quota, self._limit_s, self._pool)

    async def run(self, it: UsersObject, prompt: Prompt, policy: Policy) -> float:
        """Run one episode, and return the sum of its rewards.

        Raises:
            EpisodeLimit: there is no room for a single turn.
            Exception: any error of the environment, or TimeoutError if it took too long.
        """
        chat, ids = prompt.messages is not None, prompt.token_ids
        given = prompt.messages if chat else prompt.text
        first = await it.call("reset", given, prompt.label)
        if first is None and chat and self._tools:
            first = prompt.messages  # the prompt's own ids were tokenised without the tools
        if first is not None:
            chat = chat or not (isinstance(first, str) or is_ids(first))
            policy.prompt, ids = self._tokens.first(first, chat=chat, tools=self._tools)
        if self._tools and not chat and not is_ids(first):
            raise WrongAnswer(
                "the environment has tools, of which a chat template tells the policy, and the "
                "prompt is a text: give prompts as messages, or return messages from reset"
            )
        total = 0.0
        while True:
            try:
                reply = await policy.generate(ids, tools=self._tools)
            except EpisodeLimit:
                if not policy.num_calls:
                    raise
                policy.is_cut_off = True
                break
            action = reply.token_ids.tolist() if self._reads_ids else reply.text
            observation, reward, done = _turn(await it.call("step", action))
            policy.rows[-1].rewards[-1] = reward
            total += reward
            if done:
                break
            between = self._tokens.between(
                reply.token_ids, observation, chat=chat, tools=self._tools
            )
            ids = np.concatenate([reply.conversation, between])
        policy.metrics = it.metrics()
        return total

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._pool:
            self._pool.close()


class Agents:
    """Player of agents (`raypo.rollout.interface`), which call the policy whenever they want."""

    def __init__(self, section: RolloutSection, sessions: Sessions) -> None:
        """Load the class.

        Args:
            section: The section `rollout` of the config.
            sessions: HTTP sessions, through which agents can reach the policy.

        Raises:
            ConfigError: the class is missing or is not an agent.
        """
        self._make = load_class(
            section.agent or "", AGENT, section.agent_args, optional=OPTIONAL, key="rollout.agent"
        )
        self._sessions, self._limit_score = sessions, section.limit_score
        self._limit_s = section.step_timeout_s
        self._quota = asyncio.Semaphore(section.max_concurrent_steps)

    def begin(self) -> UsersObject:
        """Return the agent of one episode, not created yet."""
        return UsersObject(self._make, self._quota, self._limit_s)

    async def run(self, it: UsersObject, prompt: Prompt, policy: Policy) -> float:
        """Run one episode, and return the agent's score.

        If a limit of turns or tokens ends the episode, its score is `rollout.limit_score`, if set.

        Raises:
            Exception: any error of the agent, or TimeoutError if it took too long.
        """
        given = prompt.text if prompt.messages is None else prompt.messages
        policy.work_time = it.time_for("run")
        try:
            with self._sessions.open(policy):
                score = await it.call("run", given, prompt.label, policy, time=policy.work_time)
        except Exception as error:
            if self._limit_score is None or not policy.num_calls or not is_limit(error):
                raise
            policy.is_cut_off, score = True, self._limit_score
        if not isinstance(score, Real) or not math.isfinite(score):
            raise WrongAnswer(f"run returned {score!r:.100}, not a finite number")
        policy.metrics = it.metrics()
        return float(score)

    def close(self) -> None:
        """Stop the HTTP server, if it runs."""
        self._sessions.close()


def _turn(answer: Any) -> tuple[Any, float, bool]:
    """Return observation, reward and done, after checking what `step` returned."""
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        raise WrongAnswer(f"step returned {answer!r:.100}, not (observation, reward, done)")
    observation, reward, done = answer
    if not isinstance(reward, Real) or not math.isfinite(reward):
        raise WrongAnswer(f"step returned the reward {reward!r:.100}, not a finite number")
    if observation is None and not done:
        raise WrongAnswer("step returned no observation, and the episode is not done")
    return observation, float(reward), bool(done)
