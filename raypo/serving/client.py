"""Clients of engines, reference models and reward models.

`Engines` is the interface that sampling, weight sync and evaluation are written against.
`EngineClient` implements it with a deployment of vLLM engines; `raypo eval` and tests implement it
in their own process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from raypo.config import InFlight
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.pending_call import PinnedReplicas
from raypo.pending import Pending, PendingBatch, PendingPinned
from raypo.serving.engine import Engine
from raypo.serving.frozen import (
    FrozenModel,
    Ids,
    ReferenceModel,
    RewardModel,
    TopTokens,
    TorchModel,
)
from raypo.serving.requests import Completion, Load, SamplingRequest, Stretch
from raypo.types import Rollout
from raypo.weights.manifest import Manifest
from raypo.weights.messages import OfferedBucket, PushStart, Ready, Rendezvous
from raypo.weights.store import WeightSnapshot


class Engines:
    """Interface of a set of engines. A test double overrides only the methods that it needs."""

    def generate(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample a batch that shares its steps with no other request.

        Returns:
            One completion for each request, in the order given.
        """
        raise NotImplementedError

    def submit(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample requests that join the running batch at any step.

        Returns:
            One completion for each request, in the order given.
        """
        raise NotImplementedError

    async def sample(self, request: SamplingRequest) -> Completion:
        """Sample one request, which joins the running batch; no thread blocks."""
        raise NotImplementedError

    def per_engine(self) -> Sequence[Engines]:
        """Return a client for each of this worker's engines; itself if there is one."""
        raise NotImplementedError

    @property
    def preferred(self) -> tuple[int, ...]:
        """Indices of this worker's engines."""
        raise NotImplementedError

    def sharing_call(self, id: str, part: Sequence[int]) -> Engines:
        """Return a client for one batch that several workers send under the same id.

        The engine samples the batch once. Each worker gets its part, given as indices.
        """
        raise NotImplementedError

    def pinned(self) -> PinnedEngines:
        """Return the engines that are up now, for a push."""
        raise NotImplementedError

    def require(self, method: str | None, *args: object) -> None:
        """Set the call that an engine makes to itself before each request. None means no call."""
        raise NotImplementedError

    def generate_on_all(
        self, requests: Sequence[SamplingRequest]
    ) -> Sequence[Pending[list[Completion]]]:
        """Sample the same batch on every engine that is up, as `generate`."""
        raise NotImplementedError

    def submit_on_all(
        self, requests: Sequence[SamplingRequest]
    ) -> Sequence[Pending[list[Completion]]]:
        """Sample the same requests on every engine that is up, as `submit`."""
        raise NotImplementedError


class PinnedEngines:
    """The engines that were up when a push began; each method calls all of them."""

    def begin_push(self, start: PushStart) -> Sequence[PendingPinned[Ready]]:
        """Begin a weight push (`Engine.begin_push`)."""
        raise NotImplementedError

    def join_group(self, rendezvous: Rendezvous) -> Sequence[PendingPinned[None]]:
        """Join a broadcast group."""
        raise NotImplementedError

    def load_bucket(self, bucket: OfferedBucket) -> Sequence[PendingPinned[None]]:
        """Load the tensors of a bucket."""
        raise NotImplementedError

    def finish_push(self, manifest: Manifest) -> Sequence[PendingPinned[Manifest]]:
        """Serve the new weights; the values are the manifests of the tensors that arrived."""
        raise NotImplementedError

    def hold(
        self, *pushes: WeightSnapshot, in_flight: InFlight | None = None
    ) -> Sequence[PendingPinned[None]]:
        """Load those of these pushes that an engine lacks."""
        raise NotImplementedError


@dataclass(frozen=True)
class EngineClient(Engines):
    """Client of a deployment of engines; any number of threads and processes may use it."""

    handle: DeploymentHandle

    def generate(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample a batch that shares its steps with no other request (`Engine.generate`)."""
        return _awaited(self.handle.call(Engine.begin_generate, requests))

    def submit(self, requests: Sequence[SamplingRequest]) -> PendingBatch[Completion]:
        """Sample requests that join the running batch at any step (`Engine.submit`)."""
        return _awaited(self.handle.call(Engine.submit, requests))

    async def sample(self, request: SamplingRequest) -> Completion:
        """Sample one request, which joins the running batch; no thread blocks."""
        (completion,) = await self.handle.call_async(Engine.submit, [request])
        return cast(Completion, completion)  # the replica has awaited the future

    def generate_on_all(
        self, requests: Sequence[SamplingRequest]
    ) -> Sequence[Pending[list[Completion]]]:
        """Sample the same batch on every engine that is up, as `generate`."""
        return [_awaited(each) for each in self.handle.call_all(Engine.begin_generate, requests)]

    def submit_on_all(
        self, requests: Sequence[SamplingRequest]
    ) -> Sequence[Pending[list[Completion]]]:
        """Sample the same requests on every engine that is up, as `submit`."""
        return [_awaited(each) for each in self.handle.call_all(Engine.submit, requests)]

    def per_engine(self) -> list[EngineClient]:
        """Return a client for each of this worker's engines; itself if there is one."""
        return [EngineClient(each) for each in self.handle.per_replica()]

    @property
    def preferred(self) -> tuple[int, ...]:
        """Indices of this worker's engines."""
        return self.handle.preferred

    def sharing_call(self, id: str, part: Sequence[int]) -> EngineClient:
        """Return a client for one batch that several workers send under the same id."""
        return EngineClient(self.handle.sharing_call(id, part))

    def pinned(self) -> PinnedEngineClient:
        """Return the engines that are up now (`DeploymentHandle.pinned`)."""
        return PinnedEngineClient(self.handle.pinned())

    def require(self, method: str | None, *args: object) -> None:
        """Set the call that an engine makes to itself before each request. None means no call."""
        self.handle.require(method, *args)

    @property
    def required(self) -> tuple[Any, ...]:
        """The arguments that `require` was last called with."""
        return self.handle.required

    def wait(self, timeout_s: float) -> None:
        """Wait until every engine has started (`DeploymentHandle.wait`)."""
        self.handle.wait(timeout_s)


def _awaited(call: Any) -> Any:
    """Type a call to a method that returns futures: the replica awaits them before it replies."""
    return call


@dataclass(frozen=True)
class PinnedEngineClient(PinnedEngines):
    """Client of the engines that were up when it was made; each method calls all of them."""

    replicas: PinnedReplicas

    @property
    def names(self) -> list[str]:
        """Name of each engine, in the order of the values."""
        return self.replicas.names

    def begin_push(self, start: PushStart) -> Sequence[PendingPinned[Ready]]:
        """Begin a weight push (`Engine.begin_push`)."""
        return self.replicas.call(Engine.begin_push, start)

    def join_group(self, rendezvous: Rendezvous) -> Sequence[PendingPinned[None]]:
        """Join a broadcast group (`Engine.join_group`)."""
        return self.replicas.call(Engine.join_group, rendezvous)

    def load_bucket(self, bucket: OfferedBucket) -> Sequence[PendingPinned[None]]:
        """Load the tensors of a bucket (`Engine.load_bucket`)."""
        return self.replicas.call(Engine.load_bucket, bucket)

    def finish_push(self, manifest: Manifest) -> Sequence[PendingPinned[Manifest]]:
        """End a push and serve the new weights (`Engine.finish_push`)."""
        return self.replicas.call(Engine.finish_push, manifest)

    def hold(
        self, *pushes: WeightSnapshot, in_flight: InFlight | None = None
    ) -> Sequence[PendingPinned[None]]:
        """Load those of these pushes that an engine lacks (`Engine.hold`)."""
        return self.replicas.call(Engine.hold, *pushes, in_flight=in_flight)

    def resume(self) -> Sequence[PendingPinned[None]]:
        """Resume sampling after a pause (`Engine.resume`)."""
        return self.replicas.call(Engine.resume)

    def sleep(self, *, before_push: bool = False) -> Sequence[PendingPinned[None]]:
        """Free the GPU's memory (`Engine.sleep`)."""
        return self.replicas.call(Engine.sleep, before_push=before_push)

    def wake_up(self, part: Any = None) -> Sequence[PendingPinned[None]]:
        """Take memory back, for `weights`, `kv_cache` or both (`Engine.wake_up`)."""
        return self.replicas.call(Engine.wake_up, part)

    def cancel_other_attempts(self, run: str, attempt: str) -> Sequence[PendingPinned[int]]:
        """Cancel requests of a run's other attempts (`Engine.cancel_other_attempts`)."""
        return self.replicas.call(Engine.cancel_other_attempts, run, attempt)

    def drop_adapter(self, name: str) -> Sequence[PendingPinned[None]]:
        """Drop an adapter to free its slot (`Engine.drop_adapter`)."""
        return self.replicas.call(Engine.drop_adapter, name)

    def stretch(self) -> Sequence[PendingPinned[tuple[Load, Stretch]]]:
        """Return the current load, and means and peaks since the last call (`Engine.stretch`)."""
        return self.replicas.call(Engine.stretch)

    def peak_memory(self) -> Sequence[PendingPinned[dict[str, float]]]:
        """Return the peak memory of each engine's processes, in GB."""
        return self.replicas.call(Engine.peak_memory)


@dataclass(frozen=True)
class FrozenClient:
    """Client of a deployment of a frozen model: reference, teacher or reward model."""

    handle: DeploymentHandle

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started (`DeploymentHandle.wait`)."""
        self.handle.wait(timeout_s)

    # Only method names are sent, and `TorchModel` and `VllmModel` have the same methods.
    def sleep(self) -> Sequence[PendingPinned[None]]:
        """Free the GPU's memory, on all replicas that are up."""
        return self.handle.pinned().call(TorchModel.sleep)

    def wake_up(self) -> Sequence[PendingPinned[None]]:
        """Take memory back, on all replicas that are up."""
        return self.handle.pinned().call(TorchModel.wake_up)

    def peak_memory(self) -> Sequence[PendingPinned[dict[str, float]]]:
        """Return the peak memory of each replica's processes, in GB."""
        return self.handle.pinned().call(FrozenModel.peak_memory)


class ReferenceClient(FrozenClient):
    """Client of a reference model, or of a teacher."""

    def log_probs(self, rollouts: list[Rollout]) -> Pending[list[np.ndarray]]:
        """Return the log-probs of each response's tokens in nats, float32 [T]."""
        return self.handle.call(ReferenceModel.log_probs, rollouts)

    def top_log_probs(
        self, sequences: Sequence[Ids], count: int, vocabulary: int
    ) -> Pending[list[TopTokens]]:
        """Return the top tokens at each response position (`ReferenceModel.top_log_probs`)."""
        return self.handle.call(ReferenceModel.top_log_probs, sequences, count, vocabulary)


class RewardModelClient(FrozenClient):
    """Client of a reward model."""

    def score(self, rollouts: list[Rollout]) -> Pending[list[float]]:
        """Return one score for each rollout, in the order given."""
        return self.handle.call(RewardModel.score, rollouts)
