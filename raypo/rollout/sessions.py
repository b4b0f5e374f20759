"""The policy by OpenAI's protocol, for agents that ask over HTTP: an API key is an episode."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import uvicorn
from ray.util import get_node_ip_address
from starlette.requests import Request

from raypo.config import ConfigError, RolloutSection
from raypo.data.turns import Tools, is_ids
from raypo.endpoint.app import Endpoint, Wanted, app_of
from raypo.endpoint.protocol import ChatRequest, RequestError, template_messages
from raypo.endpoint.text import ResponseText
from raypo.rollout.policy import LIMIT, EpisodeLimit, Policy, Said
from raypo.serving.requests import Completion, Heard, SamplingRequest

T = TypeVar("T")
KEEP_ALIVE_S = 600
"""Longer than clients keep a connection that is idle, so that they are the ones to close it."""


class Sessions:
    """The episodes of this process whose policies can be asked.

    They share one server, which is started when the first of them wants it.
    """

    def __init__(
        self, tokenizer: Any, stop_token_ids: Sequence[int], section: RolloutSection
    ) -> None:
        """Only note them."""
        self._tokenizer, self._section = tokenizer, section
        self._stop_token_ids = tuple(stop_token_ids)
        self._endpoints: dict[str, Endpoint] = {}
        self._server: uvicorn.Server | None = None
        self._starting = threading.Lock()
        self._base_url = ""

    @contextmanager
    def open(self, policy: Policy) -> Iterator[None]:
        """Let an episode's policy be asked meanwhile; from its event loop."""
        session = _Session(policy, self._tokenizer, self._stop_token_ids, self._section)
        policy.endpoint, policy.api_key = self._started, secrets.token_urlsafe()
        self._endpoints[policy.api_key] = Endpoint(session, max_requests=sys.maxsize)
        try:
            yield
        finally:
            del self._endpoints[policy.api_key]
            session.close()

    def close(self) -> None:
        """End the server, if there is one."""
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
                    app_of(self._endpoint_of),
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                )
                self._server = uvicorn.Server(config)
                run = {"target": self._server.run, "kwargs": {"sockets": [listening]}}
                threading.Thread(**run, daemon=True).start()
            return self._base_url

    def _endpoint_of(self, request: Request) -> Endpoint | None:
        given = request.headers.get("Authorization", "")
        return self._endpoints.get(given.removeprefix("Bearer "))


@dataclass(eq=False)
class _Session:
    """One episode's policy: asked in the server's event loop, it answers in the episode's."""

    policy: Policy
    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    section: RolloutSection
    name: str = "policy"
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _answers: dict[str, asyncio.Future[Completion]] = field(default_factory=dict)
    """By request, those that were begun and that nobody waits for yet."""
    _under_way: set[Future[Any]] = field(default_factory=set)
    _is_over: bool = False

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self.policy.max_tokens

    @property
    def sampler(self) -> _Session:
        """Itself."""
        return self

    async def asked(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        """What a request asks for, whatever model it names: there is one. It is begun at once.

        Raises:
            RequestError: it wants what the run fixes otherwise, or the template refuses it.
        """
        self._refuse_what_is_fixed(wanted)
        return await self._there(self._begun(wanted))

    async def sample(self, request: SamplingRequest, heard: Heard) -> Completion:
        """One response, recorded; told as a whole.

        Raises:
            RequestError: the episode may have no further turn, or is over.
        """
        try:
            return await self._there(self._answer(request.id))
        except asyncio.CancelledError:  # perhaps before `_answer` has begun
            self._loop.call_soon_threadsafe(self._give_up, request.id)
            raise

    def close(self) -> None:
        """The episode is over: what it still asks is not answered."""
        self._is_over = True
        for each in (*self._answers.values(), *list(self._under_way)):
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

    async def _begun(self, wanted: Wanted) -> tuple[list[list[int]], list[SamplingRequest]]:
        """In the episode's event loop: so all responses to a request are sampled at a time."""
        tools = None
        if isinstance(wanted, ChatRequest):
            prompts: list[Any] = [template_messages(wanted.messages)]
            tools = wanted.told_tools
        else:
            prompts = wanted.prompts
        all_said = [None if is_ids(each) else each for each in prompts]
        try:
            all_ids = [
                np.asarray(each, np.int32) if said is None else self.policy.ids_of(said, tools)
                for each, said in zip(prompts, all_said, strict=True)
            ]
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the prompt cannot be told to the policy: {error}") from error
        requests: list[SamplingRequest] = []
        for ids, said in zip(all_ids, all_said, strict=True):
            for _ in range(wanted.n):
                request = SamplingRequest(
                    ids,
                    wanted.most_tokens or self.policy.max_new_tokens,
                    self.section.temperature,
                    stop=tuple(wanted.stops),
                    stop_token_ids=self.stop_token_ids,
                    id=secrets.token_hex(12),
                )
                work = self._sampled(request, said, tools)
                self._answers[request.id] = asyncio.ensure_future(work)
                requests.append(request)
        return [ids.tolist() for ids in all_ids], requests

    async def _answer(self, request_id: str) -> Completion:
        return await self._answers.pop(request_id)

    def _give_up(self, request_id: str) -> None:
        """What nobody will read is not sampled, let alone trained."""
        if answer := self._answers.pop(request_id, None):
            answer.cancel()

    async def _sampled(
        self, request: SamplingRequest, said: Said | None, tools: Tools
    ) -> Completion:
        try:
            row, completion = await self.policy.sample(
                request.prompt_ids, max_new_tokens=request.max_new_tokens, stop=request.stop
            )
        except EpisodeLimit as error:
            raise RequestError(str(error), code=LIMIT) from None
        if said is not None:
            told = ResponseText(  # with the stop string, which the client is not told: it was read
                self.tokenizer, stop_token_ids=self.stop_token_ids, tools=tools
            )
            told.add(completion.token_ids.tolist())
            text, calls = told.finish()
            function = [{"name": each.name, "arguments": dict(each.arguments)} for each in calls]
            called = [{"type": "function", "function": each} for each in function]
            row.remember(said, text, tools, **({"tool_calls": called} if called else {}))
        return completion

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work in the episode's event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._under_way.add(future)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._is_over:
                raise RequestError("the episode is over", status=401) from None
            raise
        finally:
            self._under_way.discard(future)
