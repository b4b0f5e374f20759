"""Agents of the user's: free control flow, and every call of the policy recorded."""

from __future__ import annotations

import asyncio
import inspect
from numbers import Real
from typing import Any

from raypo.config import ConfigError, RolloutSection
from raypo.rewards.loader import load_class
from raypo.rollout.environment import WrongAnswer
from raypo.rollout.environment_pool import too_slow
from raypo.rollout.interface import AGENT
from raypo.rollout.policy import Policy
from raypo.types import Prompt


class Agents:
    """Plays episodes: an agent (`raypo.rollout.interface`) asks the policy as it likes."""

    def __init__(self, section: RolloutSection) -> None:
        """Load the class.

        Raises:
            ConfigError: it is missing or not what an agent must be.
        """
        spec, key = section.agent or "", "rollout.agent"
        self._make = load_class(spec, AGENT, section.agent_args, key=key)
        cls: Any = self._make.func
        if not inspect.iscoroutinefunction(cls.run):
            raise ConfigError(
                f"{key} ({spec}): its run is no coroutine, so it cannot wait for the policy. Write "
                "async def run(self, prompt, label, policy)."
            )
        self._timeout_s = section.step_timeout_s

    async def run(self, prompt: Prompt, policy: Policy, quota: asyncio.Semaphore) -> float:
        """One episode; the score that the agent gives it.

        Raises:
            Exception: whatever the agent raises, TimeoutError where it took too long.
        """
        given = prompt.text if prompt.messages is None else prompt.messages
        policy.limit_s, policy.limit = self._timeout_s, asyncio.timeout(self._timeout_s)
        try:
            async with policy.limit:
                score = await self._make().run(given, prompt.label, policy)
        except TimeoutError:
            if not policy.limit.expired():
                raise  # one of its own
            raise too_slow("run", self._timeout_s) from None
        if not isinstance(score, Real) or score != score or abs(score) == float("inf"):
            raise WrongAnswer(f"run returned {score!r:.100}, not a finite number")
        return float(score)

    def close(self) -> None:
        """There is nothing to end."""
