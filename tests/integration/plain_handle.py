"""The calls of a deployment handle on bare actors, for tests that need no controller."""

from __future__ import annotations

from typing import Any

import ray


class PlainResponse:
    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def result(self) -> Any:
        return ray.get(self._ref)

    def failure(self) -> Exception | None:
        if not ray.wait([self._ref], timeout=0)[0]:
            return None
        try:
            ray.get(self._ref)
        except Exception as error:
            return error
        return None


class PlainHandle:
    def __init__(self, actors: dict[str, Any]) -> None:
        self._actors = actors

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        actors = self._actors

        class Method:
            @staticmethod
            def on_all(*arguments: Any) -> list[PlainResponse]:
                calls = [getattr(actor, method) for actor in actors.values()]
                return [PlainResponse(call.remote(*arguments)) for call in calls]

        return Method

    @property
    def names(self) -> list[str]:
        return list(self._actors)

    def pinned(self) -> PlainHandle:
        return self

    def require(self, *_: Any) -> None:
        pass
