"""The policy as an OpenAI-compatible HTTP endpoint for agents; an API key identifies an episode.

Concurrency. Each learner worker has at most one server, in a daemon thread with its own event loop.
A request arrives in that loop, is sampled in the event loop of the episodes
(`run_coroutine_threadsafe`), and its future is awaited in the server's loop. Conversations are
recorded in the loop of the episodes only.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import uvicorn
from ray.util import get_node_ip_address
from starlette.requests import Request

from raypo.config import ConfigError, RolloutSection
from raypo.data.turns import Tools, is_ids
from raypo.endpoint.app import app_of
from raypo.endpoint.protocol import (
    Answered,
    ChatRequest,
    RequestError,
    Wanted,
    template_messages,
)
from raypo.endpoint.text import text_and_calls
from raypo.rollout.policy import LIMIT, EpisodeLimit, Policy, Said

KEEP_ALIVE_S = 600
"""Keep-alive of idle connections in seconds. Longer than that of clients: they close first."""


class Sessions:
    """Open episodes of this process that can be reached by HTTP.

    They share one server, which starts when an agent first reads `Policy.base_url`.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], section: RolloutSection
    ) -> None:
        """Store the arguments. The server starts later.

        Args:
            tokenizer: The policy's tokenizer.
            stop_token_ids: Tokens that end a turn.
            section: The section `rollout` of the config.
        """
        self._tokenizer, self._section = tokenizer, section
        self._stop_token_ids = tuple(stop_token_ids)
        self._open: dict[str, _Session] = {}
        """Open sessions by API key."""
        self._server: uvicorn.Server | None = None
        self._starting = threading.Lock()
        self._base_url = ""

    @contextmanager
    def open(self, policy: Policy) -> Iterator[None]:
        """Serve an episode's policy within this context; called in the episode's event loop."""
        session = _Session(policy, self._tokenizer, self._stop_token_ids, self._section)
        policy.endpoint, policy.api_key = self._started, secrets.token_urlsafe()
        self._open[policy.api_key] = session
        try:
            yield
        finally:
            del self._open[policy.api_key]
            session.close()

    def close(self) -> None:
        """Stop the server, if it runs."""
        if self._server:
            self._server.should_exit = self._server.force_exit = True

    def _started(self) -> str:
        with self._starting:
            if self._server is None:
                host = self._section.endpoint_host
                try:
                    listening = socket.create_server((host, 0), backlog=2048)
                except OSError as error:
                    raise ConfigError(
                        f"rollout.endpoint_host ({host}): cannot be listened on here: {error}. Set "
                        f"it to 127.0.0.1, to 0.0.0.0, or to an address of every worker's node."
                    ) from error
                reached = get_node_ip_address() if host == "0.0.0.0" else host
                self._base_url = f"http://{reached}:{listening.getsockname()[1]}/v1"
                config = uvicorn.Config(
                    app_of(self._session_of),
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                )
                self._server = uvicorn.Server(config)
                run = {"target": self._server.run, "kwargs": {"sockets": [listening]}}
                threading.Thread(**run, daemon=True).start()
            return self._base_url

    def _session_of(self, request: Request) -> _Session | None:
        given = request.headers.get("Authorization", "")
        return self._open.get(given.removeprefix("Bearer "))


@dataclass(eq=False)
class _Session:
    """One episode's policy. Requests arrive in the server's event loop and run in the episode's."""

    policy: Policy
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    section: RolloutSection
    name: str = "policy"
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _under_way: set[Future[Any]] = field(default_factory=set)
    _is_over: bool = False

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self.policy.max_tokens

    async def answer(self, wanted: Wanted) -> tuple[list[list[int]], list[Answered]]:
        """Sample the responses to a request. The model that it names is ignored.

        Args:
            wanted: The request.

        Returns:
            Token ids of the prompts, and `n` responses to each, in order.

        Raises:
            RequestError: the request contradicts a setting of the run, the chat template refuses
                it, or the episode may have no further turn, or is over.
            ValueError: the policy refuses the arguments.
        """
        self._refuse_what_is_fixed(wanted)
        answer = asyncio.run_coroutine_threadsafe(self._answer(wanted), self._loop)
        self._under_way.add(answer)
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if self._is_over:
                raise RequestError("the episode is over", 401) from None
            raise
        finally:
            self._under_way.discard(answer)

    def close(self) -> None:
        """End the session: the episode is over, so cancel its requests."""
        self._is_over = True
        for each in list(self._under_way):
            each.cancel()

    def _refuse_what_is_fixed(self, wanted: Wanted) -> None:
        for key in ("temperature", "top_p"):
            value, fixed = getattr(wanted, key), getattr(self.section, key)
            if value not in (None, fixed):
                raise RequestError(
                    f"{key} ({value}): a run samples what it trains with rollout.{key} ({fixed}). "
                    f"Leave {key} out, or set rollout.{key}."
                )
        if wanted.seed is not None:
            raise RequestError(
                f"seed ({wanted.seed}): each turn of an episode has one of its own, made from the "
                "run's. Leave it out."
            )

    async def _answer(self, wanted: Wanted) -> tuple[list[list[int]], list[Answered]]:
        """Sample all responses to a request at once; runs in the episode's event loop."""
        tools = None
        if isinstance(wanted, ChatRequest):
            prompts: list[Any] = [template_messages(wanted.messages)]
            tools = wanted.offered_tools
        else:
            prompts = wanted.prompts
        all_said = [None if is_ids(each) else each for each in prompts]
        try:
            all_ids = [
                np.asarray(each, np.int32) if said is None else self.policy.ids_of(said, tools)
                for each, said in zip(prompts, all_said, strict=True)
            ]
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template refuses the prompt: {error}") from error
        tasks = [
            asyncio.ensure_future(self._sampled(wanted, ids, said, tools))
            for ids, said in zip(all_ids, all_said, strict=True)
            for _ in range(wanted.n)
        ]
        try:
            return [ids.tolist() for ids in all_ids], await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _sampled(
        self, wanted: Wanted, ids: np.ndarray, said: Said | None, tools: Tools
    ) -> Answered:
        """Sample one response, and record it."""
        try:
            row, sampled = await self.policy.sample(
                ids, max_new_tokens=wanted.most_tokens, stop=wanted.stops
            )
        except EpisodeLimit as error:
            raise RequestError(str(error), code=LIMIT) from None
        if sampled.finish_reason not in ("stop", "length"):
            raise RequestError(f"the response was given back: {sampled.finish_reason}", 503)
        token_ids = sampled.token_ids.tolist()
        text_of = partial(
            text_and_calls,
            self.tokenizer,
            token_ids,
            stop_token_ids=self.stop_token_ids,
            tools=tools,
        )
        if said is not None:
            # With the stop string, which is in the ids: only a conversation that contains it
            # continues this row.
            text, calls = text_of()
            function = [{"name": each.name, "arguments": dict(each.arguments)} for each in calls]
            called = [{"type": "function", "function": each} for each in function]
            row.remember(said, text, tools, **({"tool_calls": called} if called else {}))
        text, calls = text_of(stop=wanted.stops)
        log_probs = sampled.log_probs.tolist()
        tokens = [self.tokenizer.decode([i]) for i in token_ids] if wanted.wants_log_probs else []
        return Answered(text, token_ids, log_probs, tokens, calls, sampled.finish_reason)
