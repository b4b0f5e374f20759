"""Step 6: the learner's weights to every engine, versioned, compared, and tried with a probe.

B probes, T response tokens.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, Protocol

import numpy as np
import ray.util
import torch
from torch import Tensor

from raypo.cluster.actors import ReplicaLost, survivors
from raypo.collectives import Workers
from raypo.config import ConfigError, EngineSection, InFlight, OnlineConfig, PolicyExamplesConfig
from raypo.data.padding import pad_right
from raypo.learner.tasks import response_batch
from raypo.serving.client import Engines
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Example, Experience, Prompt
from raypo.weight_sync.broadcast import BroadcastTransport
from raypo.weight_sync.ipc import IpcTransport
from raypo.weight_sync.transport import ObjectTransport, Transport
from raypo.weights.adapter import AdapterPush
from raypo.weights.manifest import WeightError
from raypo.weights.store import Kept

NUM_PROBES = 2
"""Prompts of a probe: a run's first ones."""
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 16, 4
"""Last tokens of each prompt that a probe reads, and tokens that it samples."""
PRIORITY = -1
"""What trains waits for a probe, where both ask an engine."""
RETRY_S = 0.2


@dataclass(frozen=True)
class Bound:
    """The largest gap between engine and learner that rounding explains, in nats a token."""

    statistic: Literal["max", "mean"]
    """max compares the worst token of a probe, mean its average token."""
    nats: float


def probe_bound(dtype: str, *, on_gpu: bool) -> Bound:
    """Return how far engine and learner may be apart; other weights are 0.7 nats apart or more.

    In float32 on CPU both compute alike. On a GPU vLLM multiplies float32 in TF32, whose mantissa
    has 10 bits: 0.0035 on average was measured on an H100, and 0.03 leaves room for deeper models.
    In bfloat16 (7 bits) both round, in different places: 0.07 on average was measured.
    """
    if dtype == "bfloat16":
        return Bound("mean", 0.15)
    return Bound("mean", 0.03) if on_gpu else Bound("max", 1e-3)


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


class AdaptedLearner(ProbedLearner, Protocol):
    """What a push needs of a learner with an adapter."""

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """The adapter as it is now, on rank 0; all workers call it."""
        ...

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights below the adapter; all workers iterate together."""
        ...


@dataclass(frozen=True)
class Probe:
    """A few prompts on which engine and learner must agree after every push."""

    prompts: Sequence[np.ndarray]  # int32 [P] each
    max_new_tokens: int
    temperature: float
    dtype: str
    seed: int
    adapter: str | None = None
    """Name of the adapter that the engine is to answer with; None: only its own weights."""
    joins: bool = False
    """Beside what the engines sample for others, rather than as a batch of its own."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        config: OnlineConfig | PolicyExamplesConfig,
        *,
        temperature: float,
        joins: bool = False,
    ) -> Probe:
        """The probe of a run: its first prompts, at the temperature that the learner reads."""
        return cls(
            prompts=[prompt.token_ids for prompt in islice(prompts, NUM_PROBES)],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            dtype=config.model.dtype,
            seed=config.seed,
            joins=joins,
        )

    def requests(self, version: int) -> list[SamplingRequest]:
        """Short samples, other ones for every version."""
        return [
            SamplingRequest(
                prompt_ids=ids[-PROBE_PROMPT_TOKENS:],
                max_new_tokens=min(PROBE_TOKENS, self.max_new_tokens),
                temperature=self.temperature,
                seed=(self.seed + 7919 * version + number) % 2**31,
                adapter=self.adapter,
                priority=PRIORITY,
            )
            for number, ids in enumerate(self.prompts)
        ]


def open_transport(
    section: EngineSection,
    *,
    colocated: bool,
    share_gpus: bool = False,
    kept: bool = False,
    in_flight: InFlight | None = None,
) -> Transport:
    """The transport that `rollout.engine.transport` names, on this learner worker.

    Args:
        section: Of the engines.
        colocated: The engines live on the learner workers' devices.
        share_gpus: Several engines live on one GPU.
        kept: The weights are pushed once and must stay at hand for engines that start later.
        in_flight: What becomes of requests that are being sampled; None: there are none.

    Raises:
        ConfigError: the one that is set cannot work here.
    """
    if kept and section.transport not in ("auto", "object"):
        raise ConfigError(
            f"rollout.engine.transport ({section.transport}): keeps nothing for engines that are "
            "started later, and model.lora.push: adapter sends the base once. Set "
            "rollout.engine.transport to auto or object, or model.lora.push to merged."
        )
    if kept:
        return ObjectTransport(in_flight=in_flight)
    kind = section.resolved_transport(
        colocated=colocated, use_gpu=torch.cuda.is_available(), share_gpus=share_gpus
    )
    if kind == "object":
        return ObjectTransport(in_flight=in_flight)
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "ipc":
        return IpcTransport(device, in_flight=in_flight)
    return BroadcastTransport(
        backend="nccl",
        device=device,
        host=ray.util.get_node_ip_address(),
        timeout_s=section.push_timeout_s,
        in_flight=in_flight,
    )


def push_weights(
    learner: PushedLearner,
    engine: Engines,
    *,
    version: int,
    transport: Transport,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Bring every engine to the learner's weights; all workers call it together.

    Where an engine is lost on the way, the push is repeated to those that are up then. From here
    on each request of `engine` requires what was pushed, so that an engine that was started again
    loads it first.

    Args:
        on_arrival: Called between transfer and probe, for which the engines must be awake.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, nats per token.

    Raises:
        WeightError: an engine received something else than was sent, or answers otherwise than
            the learner. No engine serves a version that it does not hold whole.
    """
    _send(learner.named_weights, engine, version=version, transport=transport, workers=workers)
    on_arrival()
    return try_probe(learner, engine, probe, version, workers)


def _send(
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    engine: Engines,
    *,
    version: int,
    transport: Transport,
    workers: Workers,
) -> None:
    while True:
        engine.require(None)
        try:
            transport.push(weights(), engine, version=version, workers=workers)
            break
        except Exception as error:  # all workers fail together
            if not workers.broadcast(isinstance(error, ReplicaLost)):
                raise
            time.sleep(RETRY_S)
    engine.require("hold", workers.broadcast(transport.kept))


def push_adapter(
    learner: AdaptedLearner,
    engine: Engines,
    *,
    name: str,
    version: int,
    transport: ObjectTransport,
    engines_have_base: bool,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Bring every engine to the learner's adapter; as `push_weights`.

    The weights below the adapter go first where nothing keeps them: at the first push, and where
    the actor that kept them was lost, perhaps together with the engines. The probe tries both at
    once, and until the adapter is there too no engine samples: what waits for it would fail.

    Args:
        name: Of the adapter, on the engines.
        transport: Carries the weights below the adapter, and keeps the adapter beside them.
        engines_have_base: Every engine reads the weights below the adapter by itself.
    """
    kept = transport.kept
    if not engines_have_base and workers.broadcast(kept is None or kept.fetch() is None):
        _send(learner.base_weights, engine, version=version, transport=transport, workers=workers)
    push = learner.adapter_push(name, version)
    required: list[Kept] = []
    if push is not None:
        if transport.kept is not None:
            required.append(transport.kept)
        required.append(transport.keeper.keep(push, id=uuid.uuid4().hex, adapter=name))
        up = engine.pinned()  # others hold it when they are next asked
        survivors(up.hold(*required, in_flight=transport.in_flight))
    engine.require("hold", *workers.broadcast(required))
    on_arrival()
    return try_probe(learner, engine, replace(probe, adapter=name), version, workers)


def try_probe(
    learner: ProbedLearner, engine: Engines, probe: Probe, version: int, workers: Workers
) -> dict[str, float]:
    """`mismatch/probe_gap_max` and `mismatch/probe_gap_mean` of all engines, nats per token.

    Raises:
        WeightError: they are too far apart.
    """
    answers: list[Completion] | None = None
    if workers.rank == 0:
        requests = probe.requests(version)
        # One that is lost just now is left out, and loads what the others hold when it is asked.
        on_all = engine.submit_on_all if probe.joins else engine.generate_on_all
        answers = [each for own in survivors(on_all(requests)) for each in own]
        if not answers:
            on_one = engine.submit if probe.joins else engine.generate
            answers = on_one(requests).result()
    completions: list[Completion] = workers.broadcast(answers)
    prompts = [request.prompt_ids for request in probe.requests(version)]
    prompts *= len(completions) // len(prompts)
    answered = zip(prompts, completions, strict=True)
    batch = response_batch([Example(prompt, each.token_ids) for prompt, each in answered])
    told = pad_right([each.log_probs for each in completions], torch.float32)
    gap = (learner.log_probs(batch) - told).abs()[batch.response_mask]
    metrics = {
        "mismatch/probe_gap_max": float(gap.max()),
        "mismatch/probe_gap_mean": float(gap.mean(dtype=torch.float64)),
    }
    bound = probe_bound(probe.dtype, on_gpu=torch.cuda.is_available())
    measured = metrics[f"mismatch/probe_gap_{bound.statistic}"]
    if not measured <= bound.nats:
        raise WeightError(
            f"Push of version {version}: engine and learner give other log-probs to the same "
            f"tokens ({measured:.2g} nats apart, at most {bound.nats:g} is allowed in "
            f"{probe.dtype}). The engine does not hold the learner's weights, or computes another "
            f"model; look at rollout.engine.extra."
        )
    return metrics
