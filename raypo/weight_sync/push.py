"""Step 6: push the learner's weights to all engines, verify checksums, and compare log-probs.

A probe checks the result: engine and learner must give similar log-probs to the same tokens.

Notation: B probe responses, T response tokens.
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
from raypo.weights.store import WeightSnapshot

NUM_PROBES = 2
"""Number of prompts in a probe: the first ones of a run."""
PROBE_PROMPT_TOKENS, PROBE_TOKENS = 16, 4
"""Tokens that a probe uses from the end of each prompt, and tokens that it samples."""
PRIORITY = -1
"""Priority of probes: they go before training requests, because the push is blocked on them."""
RETRY_S = 0.2


@dataclass(frozen=True)
class Bound:
    """Largest gap of log-probs between engine and learner that rounding explains."""

    statistic: Literal["max", "mean"]
    """max compares the worst token of a probe, mean its average token."""
    nats: float
    """The bound, in nats per token."""


def probe_bound(dtype: str, *, on_gpu: bool) -> Bound:
    """Return the largest allowed gap. Different weights give a gap of 0.7 nats or more."""
    # bfloat16 has 7 bits of mantissa, and both sides round in different places: 0.07 on average
    # was measured.
    if dtype == "bfloat16":
        return Bound("mean", 0.15)
    # In float32 on CPU both compute alike. On a GPU vLLM multiplies float32 in TF32 (10 bits):
    # 0.0035 on average was measured on an H100, and 0.03 leaves room for deeper models.
    return Bound("mean", 0.03) if on_gpu else Bound("max", 1e-3)


class ProbedLearner(Protocol):
    """A learner that can compute the log-probs of a probe."""

    def log_probs(self, experience: Experience) -> Tensor:
        """Return the log-probs of response tokens, [B, T] float32, in nats."""
        ...


class PushedLearner(ProbedLearner, Protocol):
    """A learner whose weights can be pushed."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by their checkpoint names; all workers iterate together."""
        ...


class AdaptedLearner(ProbedLearner, Protocol):
    """A learner whose LoRA adapter can be pushed."""

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """Return the current adapter on rank 0, None elsewhere; all workers call it."""
        ...

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights, without the adapter; all workers iterate together."""
        ...


@dataclass(frozen=True)
class Probe:
    """Prompts on which the log-probs of engine and learner are compared after every push."""

    prompts: Sequence[np.ndarray]  # int32 [P] each
    max_new_tokens: int
    temperature: float
    dtype: str
    seed: int
    adapter: str | None = None
    """Name of the adapter to sample with. None means the engines' own weights."""
    joins: bool = False
    """True if the probe joins running batches of the engines, instead of being its own batch."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        config: OnlineConfig | PolicyExamplesConfig,
        *,
        temperature: float,
        joins: bool = False,
    ) -> Probe:
        """Return the probe of a run: its first prompts, at the learner's temperature."""
        return cls(
            prompts=[prompt.token_ids for prompt in islice(prompts, NUM_PROBES)],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=temperature,
            dtype=config.model.dtype,
            seed=config.seed,
            joins=joins,
        )

    def requests(self, version: int) -> list[SamplingRequest]:
        """Return the sampling requests of the probe. Their seeds depend on the version."""
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
    """Return the transport of `rollout.engine.transport` on this learner worker.

    Args:
        section: The section `rollout.engine` of the config.
        colocated: Whether the engines are on the learner workers' devices.
        share_gpus: Whether several engines share a GPU.
        kept: Whether the weights are pushed once, and must stay available for engines that
            restart later.
        in_flight: Handling of requests in flight during a push. None means there are none.

    Raises:
        ConfigError: the configured transport does not work here.
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
    """Push the learner's weights to all engines and probe them. All workers call it together.

    If an engine is lost during the push, the push is repeated to the engines that are up then.
    Afterwards each request of `engine` requires the pushed weights, so a restarted engine loads
    them first.

    Args:
        learner: The learner.
        engine: The engines.
        version: Version of the weights.
        transport: Carries the weights.
        probe: Probe to compare engines and learner with.
        workers: The workers that train the policy.
        on_arrival: Called between transfer and probe, to wake the engines.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, in nats per token.

    Raises:
        WeightError: an engine received other bytes than were sent, or its log-probs differ from
            the learner's. No engine serves a version that it has not received completely.
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
        engine.require()
        try:
            transport.push(weights(), engine, version=version, workers=workers)
            break
        except Exception as error:  # all workers fail together
            if not workers.broadcast(isinstance(error, ReplicaLost)):
                raise
            time.sleep(RETRY_S)
    engine.require(workers.broadcast(transport.kept))


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
    """Push the learner's LoRA adapter to all engines and probe it; see `push_weights`.

    Args:
        learner: The learner.
        engine: The engines.
        name: Name of the adapter on the engines.
        version: Version of the adapter.
        transport: Carries the base weights, and keeps base and adapter for restarted engines.
        engines_have_base: Whether every engine loads the base weights by itself.
        probe: Probe to compare engines and learner with.
        workers: The workers that train the policy.
        on_arrival: Called between transfer and probe, to wake the engines.

    Returns:
        As `push_weights`.
    """
    # Push the base weights at first, and again if the actor that kept them was lost, perhaps
    # together with engines. Probe only once the adapter is there: without it requests would fail.
    kept = transport.kept
    if not engines_have_base and workers.broadcast(kept is None or kept.fetch() is None):
        _send(learner.base_weights, engine, version=version, transport=transport, workers=workers)
    push = learner.adapter_push(name, version)
    required: list[WeightSnapshot] = []
    if push is not None:
        if transport.kept is not None:
            required.append(transport.kept)
        required.append(transport.weight_store.keep(push, id=uuid.uuid4().hex, adapter=name))
        # Engines that are down load it before their next request.
        survivors(engine.hold(*required, in_flight=transport.in_flight))
    engine.require(*workers.broadcast(required))
    on_arrival()
    return try_probe(learner, engine, replace(probe, adapter=name), version, workers)


def try_probe(
    learner: ProbedLearner, engine: Engines, probe: Probe, version: int, workers: Workers
) -> dict[str, float]:
    """Compare the log-probs of all engines with the learner's. All workers call it together.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, in nats per token.

    Raises:
        WeightError: the gap exceeds `probe_bound`.
    """
    answers: list[Completion] | None = None
    if workers.rank == 0:
        requests = probe.requests(version)
        # An engine that was just lost is left out. It loads the weights before its next request.
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
