"""Answers from before the first update: trials of a sweep that ask the same sample them once.

Each request has a seed of its own, so trials that start from the same policy with the same prompts,
sampling and seed sample the same responses, whatever they do with them afterwards.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import ray
from ray.actor import ActorHandle

from raypo.calls import Here
from raypo.cluster.actors import is_alive
from raypo.config import OnlineConfig
from raypo.rollout.collect import Sampler, ask
from raypo.serving.requests import Completion, SamplingRequest

THREADS = 16
"""Of the actor: one that looks after a maker is not in the way of its answers."""
LOOK_EVERY_S = 0.5
"""How often one that waits looks whether the answers are there, or their maker has died."""


class FirstAnswers:
    """What a sweep's trials were answered before their first update. A zero-CPU actor."""

    def __init__(self) -> None:
        self._answers: dict[str, list[Completion]] = {}
        self._makers: dict[str, ActorHandle] = {}
        self._lock = threading.Lock()

    def find(self, key: str, asker: ActorHandle) -> list[Completion] | Literal["make", "wait"]:
        """The answers, where they are there.

        Returns:
            "make" where the caller is the one who makes them, "wait" where another one, who is
            alive, is at it.
        """
        with self._lock:
            if key in self._answers:
                return self._answers[key]
            maker = self._makers.get(key)
        if maker is not None and is_alive(maker):
            return "wait"
        with self._lock:
            if self._makers.get(key) is not maker or key in self._answers:
                return "wait"  # somebody came first, or the answers have
            self._makers[key] = asker
            return "make"

    def put(self, key: str, answers: list[Completion] | None) -> None:
        """What the maker has made; None where it failed and somebody else may try."""
        with self._lock:
            self._makers.pop(key, None)  # another one may have been taken for dead
            if answers is not None:
                self._answers[key] = answers

    def __repr__(self) -> str:
        return f"FirstAnswers({len(self._answers)} calls)"


def start_first_answers() -> ActorHandle:
    """The actor; it lives as long as this process."""
    cls: Any = ray.remote(FirstAnswers)
    return cls.options(num_cpus=0, max_concurrency=THREADS).remote()


@dataclass
class Recalling:
    """Engines that are asked only what no other trial has asked; good until the first update."""

    engine: Sampler
    answers: ActorHandle
    config: OnlineConfig
    has_recalled: bool = field(default=False, init=False)
    """Whether the last call was answered with what another trial has sampled."""

    @property
    def generate(self) -> Here[[list[SamplingRequest]], list[Completion]]:
        """One response a request, in the order given."""
        return Here(self._recall_or_ask)

    async def join(self, request: SamplingRequest) -> Completion:
        """One response; what is not asked together is not recalled."""
        return await self.engine.join(request)

    def each_preferred(self) -> Sequence[Sampler]:
        """Itself: what this worker asks is recalled as a whole."""
        return [self]

    def _recall_or_ask(self, requests: list[SamplingRequest]) -> list[Completion]:
        actor: Any = self.answers
        this_worker = ray.get_runtime_context().current_actor
        key = f"{made_from(self.config)}: {digest(requests)}"
        while (found := ray.get(actor.find.remote(key, this_worker))) == "wait":
            time.sleep(LOOK_EVERY_S)
        self.has_recalled = found != "make"
        if self.has_recalled:
            return found
        try:
            made = ask(requests, self.engine)
        except BaseException:
            ray.get(actor.put.remote(key, None))
            raise
        ray.get(actor.put.remote(key, made))
        return made


def made_from(config: OnlineConfig) -> str:
    """What engines are made from, before their weights are trained."""
    return repr((config.model.policy, config.model.dtype, config.rollout.engine))


def digest(requests: Sequence[SamplingRequest]) -> str:
    """Of all that the answers depend on; an adapter changes nothing before its first update."""
    content = hashlib.sha256()
    for request in requests:
        content.update(np.ascontiguousarray(request.prompt_ids).tobytes())
        content.update(repr(replace(request, prompt_ids=None, adapter=None)).encode())
    return content.hexdigest()
