"""Run environments of the package `verifiers` as agents that call the run's endpoint.

Concurrency. All episodes share one environment object and one HTTP client, and run in
the event loop of the episodes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers import Environment, Rubric  # pyright: ignore[reportMissingImports]
from verifiers.clients import (  # pyright: ignore[reportMissingImports]
    OpenAIChatCompletionsClient,
)
from verifiers.errors import (  # pyright: ignore[reportMissingImports]
    ModelError,
    OverlongPromptError,
)

from raypo.config import ConfigError
from raypo.data.verifiers_environment import load_verifiers
from raypo.endpoint.app import NAME
from raypo.rollout.policy import EpisodeLimit, is_limit
from raypo.rollout.session import Session

_raised: ContextVar[list[Exception]] = ContextVar("raised")
"""Errors of an episode's reward functions."""


class VerifiersError(RuntimeError):
    """An episode of an environment of verifiers failed."""


def open_verifiers(name: str, arguments: Mapping[str, Any]) -> partial[VerifiersAgent]:
    """Load an environment, and return a partial that creates the agent of an episode.

    Raises:
        ConfigError: the environment cannot be loaded, is not a chat environment, or scores the
            episodes of a group together.
    """
    key = "rollout.environment"
    environment = load_verifiers(name, arguments, key=key)
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{key} (verifiers:{name}): its rubric scores all episodes of a group together, but "
            "raypo scores each episode separately. Use reward functions for single episodes; "
            "ppo.advantage: grpo compares the group."
        )
    if environment.message_type != "chat":
        raise ConfigError(
            f"{key} (verifiers:{name}): its message_type is {environment.message_type}, but only "
            "chat is supported."
        )
    for rubric in _rubrics(environment.rubric):
        rubric.funcs = [_noting(function) for function in rubric.funcs]
    return partial(VerifiersAgent, environment, _Connections())


class VerifiersAgent:
    """Agent of one episode. Its score is the rubric's weighted sum; each function is one part."""

    def __init__(self, environment: Environment, connections: _Connections) -> None:
        """Store the environment and the HTTP client, which all episodes share."""
        self._environment, self._connections = environment, connections

    async def run(self, prompt: Any, label: Any, policy: Session) -> dict[str, float]:
        """Run the episode.

        Raises:
            EpisodeLimit: there was no room for a single turn.
            VerifiersError: the environment reported an error.
            Exception: any error of the environment or of a reward function.
        """
        client = _PolicyClient(await self._connections.client_of(policy))
        is_text = isinstance(prompt, str)
        row = {"answer": "" if label is None else label, **policy.prompt.row}
        row |= {
            "prompt": [{"role": "user", "content": prompt}] if is_text else prompt,
            "example_id": policy.prompt.index,
        }
        _raised.set(raised := [])
        output = await self._environment.run_rollout(row, client, NAME, {})
        if client.limit is not None:
            if not policy.num_calls:
                raise EpisodeLimit(str(client.limit)) from client.limit
            policy.is_cut_off = True
        if raised:
            raise raised[0]
        if error := output.get("error"):
            raise VerifiersError(error["error_chain_str"])
        return {**(output["metrics"] or {}), "score": output["reward"]}


class _Connections:
    """HTTP client that all episodes share, because one takes about 30 ms to create."""

    def __init__(self) -> None:
        self._lifetime: AsyncGenerator[AsyncOpenAI] | None = None
        self._client: AsyncOpenAI | None = None

    async def client_of(self, policy: Session) -> AsyncOpenAI:
        """Return the client, set to the URL and the API key of an episode."""
        url, key = policy.base_url, policy.api_key
        if self._client is None:  # nothing below suspends, so no other episode can interfere
            self._lifetime = _open_client(url, key)
            self._client = await anext(self._lifetime)
        return self._client.with_options(base_url=url, api_key=key)


async def _open_client(url: str, key: str) -> AsyncGenerator[AsyncOpenAI]:
    """Yield a client. The event loop closes it at shutdown, like all async generators."""
    # Proxies could not reach this machine, and a repeated request would be sampled twice.
    http_client = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
    async with AsyncOpenAI(
        base_url=url, api_key=key, http_client=http_client, max_retries=0
    ) as client:
        yield client


class _PolicyClient(OpenAIChatCompletionsClient):
    """The package's client, which reports a limit of the run as an overlong prompt."""

    limit: Exception | None = None
    """Error of a call that the run's limits refused."""

    async def get_response(self, *args: Any, **kwargs: Any) -> Any:
        """Return the response.

        Raises:
            OverlongPromptError: the run's limits refuse the call. The environment then ends the
                episode and scores it as it is.
            ModelError: any other error of the call.
        """
        try:
            return await super().get_response(*args, **kwargs)
        except ModelError as error:
            if not is_limit(error):
                raise
            self.limit = error
            raise OverlongPromptError from error

    async def raise_from_native_response(self, response: Any) -> None:
        """Accept empty turns: the policy chose them, and the rubric scores them."""

    async def from_native_response(self, response: Any) -> Any:
        """Return the response in the package's form. An empty turn keeps its empty text.

        Version 0.3 replaces it with null, which the endpoint refuses in the next request.
        """
        answer = await super().from_native_response(response)
        if answer.message.content is None and not answer.message.tool_calls:
            answer.message.content = ""
        return answer


def _rubrics(rubric: Rubric) -> Iterator[Rubric]:
    """Yield a rubric and, if it is a group, the rubrics in it."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function to record its errors, which the package would only score as 0."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            _raised.get().append(error)
            raise

    return call
