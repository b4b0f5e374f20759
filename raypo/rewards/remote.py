"""Clients of reward servers over HTTP, with retries, load balancing and batching."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from raypo.pending_work import moved
from raypo.rewards.wire import from_answer, to_request
from raypo.types import Rollout

BACKOFF_S = (0.25, 30.0)
"""Bounds of the random exponential backoff, in seconds. The wait is a random fraction of a limit.
This limit begins at the first number, and doubles with each attempt up to the second number."""
MAX_ANSWER_BYTES = 64 << 20
"""Size limit of a server's answer, after it is decompressed."""
MAX_REASON = 1000
"""Characters of a server's error message that are shown."""
Read = Callable[[Any, float], Any]
"""Function `(answer, seconds)` of the JSON value that a server has answered, and its duration."""
Post = Callable[[Any, Read], Awaitable[Any]]
"""Function `(body, read)` that posts a request body, and returns what `read` returns."""
THIS_MACHINE: Any = dict.fromkeys(("all://127.0.0.1", "all://localhost", "all://[::1]"))
"""Servers to which no proxy of the environment applies: it could not reach them."""
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteRewardError(RuntimeError):
    """A reward server returned no scores, after all attempts."""


class _Retryable(RemoteRewardError):
    """An error that another attempt may resolve."""

    retry_after_s: float = 0.0


class JsonServers:
    """Client of HTTP servers that return JSON. It limits concurrency, retries and balances load.

    A request goes to the server with the fewest requests in flight. A retry goes to another server
    if there is one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None,
        max_concurrent: int,
        timeout_s: float,
        max_attempts: int,
        backoff_s: tuple[float, float] = BACKOFF_S,
    ) -> None:
        """Store the settings; see `RewardRequestSection` and `BACKOFF_S` for the limits.

        Args:
            urls: Addresses to which requests are posted.
            token: Bearer token of the requests. None or an empty string means no token.
            max_concurrent: Maximum number of requests in flight.
            timeout_s: Timeout of one attempt, in seconds.
            max_attempts: Attempts per request.
            backoff_s: Bounds of the wait between two attempts, in seconds.
        """
        self._urls = tuple(urls)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._max_concurrent, self._timeout_s = max_concurrent, timeout_s
        self._max_attempts = max_attempts
        self._first_wait_s, self._longest_wait_s = backoff_s
        self._turn = itertools.count()

    def __str__(self) -> str:
        return ", ".join(self._urls)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Post]:
        """Open the connections and yield a function `(body, read)` that posts a request.

        The function returns what `read` returns. It raises RemoteRewardError if no attempt
        succeeded, or if `read` raised ValueError.
        """
        num_in_flight = dict.fromkeys(self._urls, 0)
        room = asyncio.Semaphore(self._max_concurrent)
        limits = httpx.Limits(max_connections=self._max_concurrent)
        async with httpx.AsyncClient(
            headers=self._headers, timeout=self._timeout_s, limits=limits, mounts=THIS_MACHINE
        ) as client:

            async def post(body: Any, read: Read) -> Any:
                async with room:
                    return await self._post(client, body, read, num_in_flight)

            yield post

    async def _post(
        self,
        client: httpx.AsyncClient,
        body: Any,
        read: Read,
        num_in_flight: dict[str, int],
    ) -> Any:
        avoid = ""
        async for attempt in AsyncRetrying(
            stop=stop_after_attempt(self._max_attempts),
            wait=self._wait,
            retry=retry_if_exception_type(_Retryable),
            reraise=True,
        ):
            with attempt:
                url = self._choose(num_in_flight, avoid)
                avoid = url
                num_in_flight[url] += 1
                try:
                    # The timeout of httpx is not enough, because it restarts at each read.
                    async with asyncio.timeout(self._timeout_s):
                        return await self._attempt(client, url, body, read)
                except (TimeoutError, httpx.TimeoutException):
                    raise _Retryable(f"{url}: no answer in {self._timeout_s:g} s") from None
                finally:
                    num_in_flight[url] -= 1
                    moved()
        raise AssertionError("reraise=True leaves no way here")

    async def _attempt(
        self,
        client: httpx.AsyncClient,
        url: str,
        body: Any,
        read: Read,
    ) -> Any:
        content, begin = bytearray(), time.perf_counter()
        try:
            async with client.stream("POST", url, json=body) as response:
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise RemoteRewardError(
                            f"{url}: its answer is larger than {MAX_ANSWER_BYTES} bytes"
                        )
        except httpx.TimeoutException:
            raise
        except httpx.HTTPError as error:
            raise _Retryable(f"{url}: {type(error).__name__}: {error}") from error
        seconds = time.perf_counter() - begin
        if response.status_code != httpx.codes.OK:
            text = f"{url}: status {response.status_code}: {_reason(content)}"
            if response.status_code not in TRY_AGAIN:
                raise RemoteRewardError(text)
            error = _Retryable(text)
            error.retry_after_s = _seconds(response.headers.get("Retry-After"))
            raise error
        try:
            return read(_json(content), seconds)
        except ValueError as error:
            raise RemoteRewardError(f"{url}: {error}") from error

    def _choose(self, num_in_flight: dict[str, int], avoid: str) -> str:
        """Return the server with the fewest requests in flight, other than the last one tried."""
        others = [url for url in self._urls if url != avoid] or list(self._urls)
        # Rotate, so that ties do not always go to the first server.
        first = next(self._turn) % len(others)
        return min(others[first:] + others[:first], key=lambda url: num_in_flight[url])

    def _wait(self, state: RetryCallState) -> float:
        wait = wait_random_exponential(self._first_wait_s, self._longest_wait_s)(state)
        error = state.outcome.exception() if state.outcome else None
        retry_after = error.retry_after_s if isinstance(error, _Retryable) else 0.0
        return max(wait, min(retry_after, self._longest_wait_s))


class RemoteReward:
    """Reward function that calls servers.

    If the request of a sample fails, the sample gets an exception in place of a score.
    """

    def __init__(self, servers: JsonServers, *, batch_size: int) -> None:
        """Store the servers, and the maximum number of samples per request."""
        self._servers, self._batch_size = servers, batch_size

    def __str__(self) -> str:
        return str(self._servers)

    async def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Return one score per rollout.

        A score is None if the server returned null, and an exception if the request failed.
        """
        size = self._batch_size
        cut = [rollouts[first : first + size] for first in range(0, len(rollouts), size)]
        async with self._servers.open() as post:

            async def batch(members: list[Rollout]) -> list[Any]:
                count = len(members)
                try:
                    return await post(
                        to_request(members), lambda answer, _: from_answer(answer, count)
                    )
                except RemoteRewardError as error:
                    return [error] * count

            answers = await asyncio.gather(*map(batch, cut))
        return [score for answer in answers for score in answer]


def _json(content: bytearray) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON of its answer is nested too deeply") from None


def _reason(content: bytearray) -> str:
    try:
        return str(_json(content)["error"])[:MAX_REASON]
    except (ValueError, KeyError, TypeError):
        return content[:MAX_REASON].decode(errors="replace")


def _seconds(text: str | None) -> float:
    """Return the seconds of a `Retry-After` header, or 0 if it is missing or invalid.

    The header is a number or a date (RFC 9110, 10.2.3).
    """
    try:
        return float(text or 0.0)
    except ValueError:
        try:
            return parsedate_to_datetime(text or "").timestamp() - time.time()
        except ValueError:
            return 0.0
