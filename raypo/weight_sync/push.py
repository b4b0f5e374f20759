"""Step 6: the learner's weights to every engine, versioned, compared, and tried with a probe.

B probes, T response tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from raypo.calls import MethodOfEach
from raypo.cluster.actors import ReplicaLost
from raypo.collectives import Workers
from raypo.rollout.dealing import Deal, to_experience
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Experience, Rollout, ScoredRollout
from raypo.weights.manifest import WeightError
from raypo.weights.transport import PushedEngines, Transport

PROBE_TOKENS = 8
RETRY_S = 0.2
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.15}
"""Nats. Largest gap of a token in float32; largest mean over the probe in bfloat16, in which
engine and learner round differently (0.06 was measured)."""


class ProbedLearner(Protocol):
    """What a probe needs of a learner: its opinion of a few responses."""

    def log_probs(self, experience: Experience) -> Tensor:
        """[B, T] float32, nats."""
        ...


class PushedLearner(ProbedLearner, Protocol):
    """What a push needs of a learner besides: its weights."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under their checkpoint names; all workers iterate together."""
        ...


class ProbedEngines(Protocol):
    """What a probe asks of engines."""

    @property
    def generate(self) -> MethodOfEach[[list[SamplingRequest]], list[Completion]]:
        """One response a request, in the order given."""
        ...


class SyncedEngines(PushedEngines, ProbedEngines, Protocol):
    """What a push that is tried with a probe asks of engines."""


@dataclass(frozen=True)
class Probe:
    """A few prompts on which engine and learner must agree after every push."""

    prompts: Sequence[np.ndarray]  # int32 [P] each
    max_new_tokens: int
    temperature: float
    dtype: str
    seed: int
    adapter: str | None = None
    """Name of the adapter that the engine is to answer with; None: its own weights alone."""

    def requests(self, version: int) -> list[SamplingRequest]:
        """Short samples, other ones for every version."""
        return [
            SamplingRequest(
                prompt_ids=ids,
                max_new_tokens=min(PROBE_TOKENS, self.max_new_tokens),
                temperature=self.temperature,
                top_p=1.0,
                seed=(self.seed + 7919 * version + number) % 2**31,
                stop_token_ids=(),
                adapter=self.adapter,
            )
            for number, ids in enumerate(self.prompts)
        ]


def push_weights(
    learner: PushedLearner,
    engine: SyncedEngines,
    *,
    version: int,
    transport: Transport,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Bring every engine to the learner's weights; all workers call it together.

    Args:
        on_arrival: Called between transfer and probe, for which the engines must be awake.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, nats a token.

    Raises:
        WeightError: an engine received something else than was sent, or answers otherwise than
            the learner. No engine serves a version that it does not hold whole.
    """
    transfer(learner, engine, version=version, transport=transport, workers=workers)
    on_arrival()
    return try_probe(learner, engine, probe, version, workers)


def transfer(
    learner: PushedLearner,
    engine: PushedEngines,
    *,
    version: int,
    transport: Transport,
    workers: Workers,
) -> None:
    """Push, and again where an engine was lost on the way, to those that are up then.

    From here each request of `engine` requires what was pushed, so that an engine that was started
    again loads it first.
    """
    while True:
        engine.require(None)
        try:
            transport.push(learner.named_weights(), engine, version=version, workers=workers)
        except Exception as error:  # all workers fail together
            if not workers.broadcast(isinstance(error, ReplicaLost)):
                raise
            time.sleep(RETRY_S)
        else:
            engine.require("hold", workers.broadcast(transport.kept))
            return


def try_probe(
    learner: ProbedLearner, engine: ProbedEngines, probe: Probe, version: int, workers: Workers
) -> dict[str, float]:
    """`mismatch/probe_gap_max` and `mismatch/probe_gap_mean` of all engines, nats a token.

    Raises:
        WeightError: they are too far apart.
    """
    answers: list[Completion] | None = None
    if workers.rank == 0:
        answers = _ask_all(engine, probe.requests(version))
    completions: list[Completion] = workers.broadcast(answers)
    prompts = list(probe.prompts) * (len(completions) // len(probe.prompts))
    experience = to_experience(_as_deal(prompts, completions))
    gap = (learner.log_probs(experience) - experience.rollout_log_probs).abs()
    gap = gap[experience.response_mask]
    figures = {
        "mismatch/probe_gap_max": float(gap.max()),
        "mismatch/probe_gap_mean": float(gap.mean(dtype=torch.float64)),
    }
    measured = figures[f"mismatch/probe_gap_{'max' if probe.dtype == 'float32' else 'mean'}"]
    if not measured <= MAX_GAP[probe.dtype]:
        raise WeightError(
            f"Push of version {version}: engine and learner give other log-probs to the same "
            f"tokens ({measured:.2g} nats apart, at most {MAX_GAP[probe.dtype]:g} is allowed in "
            f"{probe.dtype}). The engine does not hold the learner's weights, or computes another "
            f"model; look at rollout.engine.extra."
        )
    return figures


def _ask_all(engine: ProbedEngines, requests: list[SamplingRequest]) -> list[Completion]:
    """Every engine's answers; one that is lost just now is left out, and loads what they hold."""
    answers: list[Completion] = []
    for response in engine.generate.on_all(requests):
        with contextlib.suppress(ReplicaLost):
            answers += response.result()
    return answers or engine.generate.remote(requests).result()


def _as_deal(prompts: list[np.ndarray], completions: list[Completion]) -> Deal:
    rollouts = [
        Rollout(
            prompt="",
            response="",
            prompt_ids=prompt,
            response_ids=completion.token_ids,
            log_probs=completion.log_probs,
            response_mask=np.ones(len(completion.token_ids), dtype=bool),
            label=None,
            prompt_index=0,
            sample_index=0,
            finish_reason=completion.finish_reason,
            weight_version=completion.weight_version,
        )
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    return Deal([ScoredRollout(rollout, 0.0, {}) for rollout in rollouts], [0] * len(rollouts))
