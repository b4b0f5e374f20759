"""What environments and agents of the user's are; nothing of raypo is needed to write one."""

from __future__ import annotations

from typing import Any, Protocol

from raypo.data.turns import Observation
from raypo.rollout.policy import Policy

AGENT = {"run": ("prompt", "label", "policy")}
ENVIRONMENT = {"reset": ("prompt", "label"), "step": ("action",)}
"""The methods that each must have, and what they are called with."""
OPTIONAL = {"close": ()}
"""A method that each may have, plain or a coroutine: called once the episode is over, however it
ended, also where another call has not come back, to end what was begun."""


class Environment(Protocol):
    """One episode's environment: made with `rollout.environment_args`, reset once, then stepped.

    The methods may be plain or coroutines. With `reads_token_ids = True` in the class, actions are
    lists of token ids, and not texts. Its `tools` are what a chat template tells the policy of:
    functions, or their JSON schemas. Actions then keep special tokens but for the one that ends a
    turn: to some models the marks of a tool call are special. Its `metrics`, numbers by their
    names, are read when the episode is over; their means over episodes are `episode/<name>`.
    A method `close()`, where there is one, is called after that.
    """

    async def reset(self, prompt: str | list[dict[str, Any]], label: Any) -> Observation | None:
        """Begin.

        Args:
            prompt: The row's prompt: its text, or its chat messages.
            label: Its label, of `data.label_key`.

        Returns:
            What the policy reads first; None: the prompt as it is.
        """
        ...

    async def step(self, action: Any) -> tuple[Observation | None, float, bool]:
        """Answer one turn of the policy.

        Args:
            action: What the policy wrote; without `tools`, without special tokens.

        Returns:
            observation: What the policy reads next; None where the episode is done.
            reward: Of this turn.
            done: Whether the episode is over.
        """
        ...


class Agent(Protocol):
    """One episode's agent: made with `rollout.agent_args`, and run once.

    It may have `metrics` and `close()`, as an environment.
    """

    async def run(self, prompt: str | list[dict[str, Any]], label: Any, policy: Policy) -> float:
        """Do what it takes; the policy may be asked as often as it is needed, also in parallel.

        A plain method runs in a thread, and asks the policy at `policy.base_url`.

        Args:
            prompt: The row's prompt: its text, or its chat messages.
            label: Its label, of `data.label_key`.
            policy: What is trained; each of its answers is.

        Returns:
            The score of all that the policy wrote.
        """
        ...
