"""Answers from before the first update: trials of a sweep that ask the same sample them once.

Each request has a seed of its own, so trials that start from the same policy with the same prompts,
sampling and seed sample the same responses, whatever they do with them afterwards.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from raypo.cluster.actors import is_alive
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.serving.requests import Completion, SamplingRequest

LOOK_EVERY_S = 0.5
"""How often one that waits looks whether the answers are there, or their maker has died."""
THREADS_PER_TRIAL = 16
"""One waits, the others are for the calls of its workers."""


class FirstAnswers:
    """What a sweep's trials were answered before their first update. A zero-CPU actor."""

    def __init__(self) -> None:
        self._answers: dict[str, dict[int, list[Completion]]] = {}
        self._makers: dict[str, ActorHandle] = {}
        self._lock = threading.Lock()

    def claim(self, key: str, count: int, maker: ActorHandle) -> bool:
        """Whether all answers are there; if not, the caller is the one who makes them.

        Waits while another one, who is alive, is at it.

        Args:
            count: Workers of a trial, each of which has answers of its own.
        """
        while True:
            with self._lock:
                if len(self._answers.get(key, ())) == count:
                    return True
                if key not in self._makers or not is_alive(self._makers[key]):
                    self._makers[key] = maker
                    return False
            time.sleep(LOOK_EVERY_S)

    def put(self, key: str, rank: int, answers: list[Completion]) -> None:
        """A worker's share."""
        with self._lock:
            self._answers.setdefault(key, {})[rank] = answers

    def get(self, key: str, rank: int) -> list[Completion]:
        """A worker's share, of answers that are there."""
        return self._answers[key][rank]

    def __repr__(self) -> str:
        return f"FirstAnswers({len(self._answers)} calls)"


def start_first_answers(num_trials: int) -> ActorHandle:
    """The actor for this many trials at a time."""
    # Workers of trials wait in `claim`, a thread each, while those that they wait for need some.
    cls: Any = ray.remote(FirstAnswers)
    return cls.options(num_cpus=0, max_concurrency=THREADS_PER_TRIAL * num_trials).remote()


@dataclass
class Recall:
    """One worker's access to the answers; good until the first update."""

    answers: ActorHandle
    config: PPOConfig
    workers: Workers
    has_recalled: bool = field(default=False, init=False)
    """Whether the last call was answered with what another trial has sampled."""

    def or_make(
        self, requests: Sequence[SamplingRequest], make: Callable[[], list[Completion]]
    ) -> list[Completion]:
        """This worker's answers; all workers call it together.

        Args:
            make: Asks the engines.
        """
        actor: Any = self.answers
        key = f"{made_from(self.config)}: {self.workers.gather(digest(requests))}"
        is_there = False
        if self.workers.rank == 0:
            this_worker = ray.get_runtime_context().current_actor
            is_there = ray.get(actor.claim.remote(key, self.workers.count, this_worker))
        self.has_recalled = self.workers.broadcast(is_there)
        if self.has_recalled:
            return ray.get(actor.get.remote(key, self.workers.rank))
        answers = make()
        ray.get(actor.put.remote(key, self.workers.rank, answers))
        return answers


def made_from(config: PPOConfig) -> str:
    """What engines are made from, before their weights are trained."""
    return repr((config.model.policy, config.model.dtype, config.rollout.engine))


def digest(requests: Sequence[SamplingRequest]) -> str:
    """Of all that the answers depend on; an adapter changes nothing before its first update."""
    content = hashlib.sha256()
    for request in requests:
        content.update(np.ascontiguousarray(request.prompt_ids).tobytes())
        content.update(repr(replace(request, prompt_ids=None, adapter=None)).encode())
    return content.hexdigest()
