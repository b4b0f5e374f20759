"""Interfaces of the user's environments and agents. Writing one needs no import of raypo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from raypo.data.turns import Observation

if TYPE_CHECKING:
    from raypo.rollout.session import Session

AGENT = {"run": ("prompt", "label", "policy")}
ENVIRONMENT = {"reset": ("prompt", "label"), "step": ("action",)}
"""Required methods and their arguments."""
OPTIONAL = {"close": ()}
"""Optional method, plain or a coroutine, to release resources. It is called once the episode is
over, however it ended, even while another call has not returned."""


class Environment(Protocol):
    """One episode's environment: made with `rollout.environment_args`, reset once, then stepped.

    The methods may be plain or coroutines. Optional members:

    - `reads_token_ids = True` in the class: actions are lists of token ids instead of texts.
    - `tools`: functions, or their JSON schemas, for the chat template. Actions then keep special
      tokens except the end of the turn: to some models the marks of a tool call are special.
    - `metrics`: numbers by name, read when the episode is over. Their means over episodes are
      reported as `episode/<name>`.
    - `close()`: called after that.
    """

    async def reset(self, prompt: str | list[dict[str, Any]], label: Any) -> Observation | None:
        """Begin the episode.

        Args:
            prompt: Prompt of the row, as text or chat messages.
            label: Label of the row, from `data.label_key`.

        Returns:
            The policy's first observation. None means the prompt itself.
        """
        ...

    async def step(self, action: Any) -> tuple[Observation | None, float, bool]:
        """Respond to one turn of the policy.

        Args:
            action: The policy's turn. Special tokens are left out unless there are `tools`.

        Returns:
            observation: The policy's next observation. May be None if the episode is done.
            reward: Reward of this turn.
            done: True if the episode is over.
        """
        ...


class Agent(Protocol):
    """One episode's agent: made with `rollout.agent_args`, and run once.

    It may have `metrics` and `close()`, like an environment.
    """

    async def run(
        self, prompt: str | list[dict[str, Any]], label: Any, policy: Session
    ) -> float | Mapping[str, Any]:
        """Run the episode. The agent may call the policy any number of times, also in parallel.

        A plain method runs in a thread, and reaches the policy at `policy.base_url`.

        Args:
            prompt: Prompt of the row, as text or chat messages.
            label: Label of the row, from `data.label_key`.
            policy: The policy. Every response that it samples is trained.

        Returns:
            The score of the whole episode, or named parts as of a reward function:
            `{"score": 1.2, "format": 0.2}`.
        """
        ...
