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
"""Optional method to release resources, plain or a coroutine. It is called when the episode has
ended for any reason, even if another call has not returned yet."""


class Environment(Protocol):
    """Environment of one episode: created from `rollout.environment_args`, reset once, and stepped.

    Each method may be plain or a coroutine. Optional members:

    - `reads_token_ids = True` in the class: actions are lists of token ids instead of texts.
    - `tools`: functions, or their JSON schemas, for the chat template. Actions then keep special
      tokens, except the end-of-turn token: the marks of a tool call are special in some models.
    - `metrics`: numbers by name, read when the episode has ended. Their means over episodes are
      reported as `episode/<name>`.
    - `close()`: releases resources. It is called after `metrics` was read.
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
            action: The policy's turn: a text, without special tokens unless there are `tools`, or a
                list of token ids with `reads_token_ids`.

        Returns:
            observation: The policy's next observation. May be None if the episode is done.
            reward: Reward of this turn.
            done: True if the episode ends with this turn.
        """
        ...


class Agent(Protocol):
    """Agent of one episode: created with `rollout.agent_args`, and run once.

    An agent may have `metrics` and `close()`, like an environment.
    """

    async def run(
        self, prompt: str | list[dict[str, Any]], label: Any, policy: Session
    ) -> float | Mapping[str, Any]:
        """Run the episode. The agent may call the policy any number of times, even in parallel.

        If `run` is a plain method, it runs in a thread, and reaches the policy at
        `policy.base_url`.

        Args:
            prompt: Prompt of the row, as text or chat messages.
            label: Label of the row, from `data.label_key`.
            policy: The policy. Every response that it samples is trained.

        Returns:
            The score of the whole episode, or a mapping with the score and named parts, like that
            of a reward function: `{"score": 1.2, "format": 0.2}`.
        """
        ...
