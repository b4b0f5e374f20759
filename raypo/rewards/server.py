"""Reward server: any reward function or model behind the JSON protocol of `raypo.rewards.wire`."""

from __future__ import annotations

import anyio
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from raypo.http_server import BodyError, body_of, has_token
from raypo.rewards.scoring import RewardError, RewardFunction, score
from raypo.rewards.wire import WireError, from_request, to_answer

RETRY_AFTER_S = 1


def make_app(
    function: RewardFunction, *, name: str, token: str | None, max_queued: int = 64
) -> Starlette:
    """Return the application: POST /score and GET /health.

    Requests are scored one at a time, in a thread, because models and most functions are not
    thread-safe.

    Args:
        function: Reward function, which returns one score per rollout.
        name: Name of the reward function, for /health.
        token: Bearer token that clients must send. None means no authentication.
        max_queued: Maximum number of waiting requests. Further requests get status 503.
    """
    turn = anyio.Semaphore(1)
    waiting = 0

    async def answer(request: Request) -> JSONResponse:
        nonlocal waiting
        if token and not has_token(request.headers, token):
            return _error(401, "the token is missing or wrong")
        if not token and "Origin" in request.headers:  # browsers say so, other clients do not
            return _error(403, "pages of a browser need a token")
        if waiting > max_queued:
            busy = {"Retry-After": str(RETRY_AFTER_S)}
            return _error(503, f"{waiting} requests are already waiting", headers=busy)
        waiting += 1  # before its body is read, so that only so many bodies are in memory
        try:
            rollouts = from_request(await body_of(request))
            async with turn:
                scores = await run_sync(lambda: score(function, rollouts))
        except BodyError as error:
            return _error(error.status, str(error))
        except WireError as error:
            return _error(422, str(error))
        except RewardError as error:
            return _error(500, str(error))
        finally:
            waiting -= 1
        return JSONResponse(to_answer(scores))

    async def health(request: Request) -> JSONResponse:
        # Anyone may ask whether the server lives, but what it serves is for those with the token.
        is_known = not token or has_token(request.headers, token)
        return JSONResponse({"status": "ok", **({"name": name} if is_known else {})})

    return Starlette(routes=[Route("/score", answer, methods=["POST"]), Route("/health", health)])


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status, headers=headers)
