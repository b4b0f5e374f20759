"""Agents of the user's: free control flow, and every call of the policy recorded."""

from __future__ import annotations

import asyncio
import inspect
import math
from numbers import Real
from typing import Any

from raypo.config import RolloutSection
from raypo.custom.loader import load_class
from raypo.rollout.environment import WrongAnswer, in_thread, metrics_of
from raypo.rollout.environment_pool import too_slow
from raypo.rollout.interface import AGENT
from raypo.rollout.policy import Policy
from raypo.rollout.sessions import Sessions
from raypo.types import Prompt


class Agents:
    """Plays episodes: an agent (`raypo.rollout.interface`) asks the policy as it likes."""

    def __init__(self, section: RolloutSection, sessions: Sessions) -> None:
        """Load the class.

        Args:
            section: What names it.
            sessions: Where it can ask the policy by HTTP.

        Raises:
            ConfigError: it is missing or not what an agent must be.
        """
        self._make = load_class(section.agent or "", AGENT, section.agent_args, key="rollout.agent")
        self._timeout_s, self._sessions = section.step_timeout_s, sessions

    async def run(self, prompt: Prompt, policy: Policy, quota: asyncio.Semaphore) -> float:
        """One episode; the score that the agent gives it.

        Raises:
            Exception: whatever the agent raises, TimeoutError where it took too long.
        """
        given = prompt.text if prompt.messages is None else prompt.messages
        limit = asyncio.timeout(self._timeout_s)
        policy.limit_s, policy.limit = self._timeout_s, limit
        try:
            async with limit:
                with self._sessions.open(policy):
                    score = await self._run(given, prompt.label, policy)
        except TimeoutError:
            if not limit.expired():
                raise  # one of its own
            raise too_slow("run", self._timeout_s) from None
        finally:
            policy.limit = None  # calls that it left behind have none
        if not isinstance(score, Real) or not math.isfinite(score):
            raise WrongAnswer(f"run returned {score!r:.100}, not a finite number")
        return float(score)

    async def _run(self, given: Any, label: Any, policy: Policy) -> Any:
        agent: Any = self._make()
        if inspect.iscoroutinefunction(agent.run):
            score = await agent.run(given, label, policy)
        else:
            score = await in_thread(lambda: agent.run(given, label, policy))
        policy.metrics = metrics_of(agent)
        return score

    def close(self) -> None:
        """End the server, if there is one."""
        self._sessions.close()
