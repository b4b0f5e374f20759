"""Weight transports: the base class, and the transport through Ray's object store.

Rank 0 calls the engines: `begin_push`, then `load_bucket` for one bucket after the other, and
finally `finish_push`, which compares the manifest. An engine serves again only after the last call,
so a push that fails in the middle leaves engines that refuse to sample. docs/architecture.md lists
the functions between a recipe's page and vLLM's `load_weights`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from torch import Tensor

from raypo.cluster.actors import ReplicaLost
from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.deployment.replica import ReplicaClient
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import as_bytes, grouped, specs_of
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksums, summary
from raypo.weights.messages import OfferedBucket, PushStart, Ready, StoredBucket, WeightPush
from raypo.weights.store import WeightSnapshot, WeightStore

RETRY_S = 0.2
REASON_S, POLL_S = 3.0, 0.05
"""Seconds to wait for the error of an engine that failed, after its peers have noticed the failure,
and the poll interval in seconds."""

NamedTensors = Iterable[tuple[str, Tensor]]


class Transport:
    """Base of the transports, which differ in the buckets that engines load (`buckets`)."""

    def __init__(
        self, *, in_flight: InFlight | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Store the settings.

        Args:
            in_flight: See `PushStart.in_flight`.
            bucket_bytes: Size of a bucket in bytes.
        """
        self.in_flight: InFlight | None = in_flight
        self.bucket_bytes = bucket_bytes
        self.weight_store = WeightStore()
        self.kept: WeightSnapshot | None = None
        """The last push that succeeded. None on ranks other than 0, and before the first push."""

    def push(
        self,
        weights: Callable[[], NamedTensors],
        engines: EngineClient,
        *,
        version: int,
        workers: Workers,
    ) -> None:
        """Send every tensor to every engine; all workers call it together, with equal tensors.

        If an engine is lost during the push, the push is repeated to the engines that are up then.
        Afterwards each request of rank 0 requires the pushed weights, so a restarted engine loads
        them first.

        Args:
            weights: Function that yields whole tensors on any device. A tensor does not change
                while it is referenced.
            engines: All engines of a run. Those that are down take no part.
            version: Version of the weights.
            workers: The workers that call this together. Rank 0 calls the engines.

        Raises:
            WeightError: on every worker, if a tensor did not arrive as it was sent.
        """
        while True:
            session = PushSession(version, self.in_flight)
            try:
                with all_or_none(workers):
                    if workers.rank == 0:
                        engines.require()
                        self.kept = None
                        self.weight_store.forget()  # free the old version first
                        session.begin(engines.handle.up())
                with all_or_none(workers), drained(weights()) as tensors:
                    for bucket in self.buckets(tensors, session, workers):
                        session.specs += bucket.specs
                        session.call(Engine.load_bucket, bucket)
                        if isinstance(bucket, StoredBucket):
                            session.stored.append(bucket)
                    if workers.rank == 0:
                        manifest = session.finish()
                        self.kept = WeightSnapshot(session.id)
                        if session.stored:
                            push = WeightPush(version, manifest, tuple(session.stored), session.id)
                            self.kept = self.weight_store.keep(push, id=push.id)
                break
            except Exception as error:  # all workers fail together
                if not workers.broadcast(isinstance(error, ReplicaLost)):
                    raise
                time.sleep(RETRY_S)
        if self.kept is not None:
            engines.require(self.kept)

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[OfferedBucket]:
        """Yield all tensors in buckets on rank 0, and nothing elsewhere. All workers iterate.

        Engines begin to load a bucket when it is yielded. Before this method changes the memory of
        the bucket, it waits for them (`PushSession.settle`).
        """
        raise NotImplementedError


@dataclass
class PushSession:
    """Rank 0's side of a push: it calls the engines that take part, and collects their replies."""

    version: int
    in_flight: InFlight | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identity of the push."""
    engines: Sequence[ReplicaClient] = ()
    """The engines that take part: those that were up when the push began."""
    ready: list[Ready] = field(default_factory=list)
    """The engines' replies to `begin_push`."""
    pending: Sequence[Future[Any]] = ()
    """Futures of the last call, one for each engine."""
    specs: list[TensorSpec] = field(default_factory=list)
    """Specs of the tensors that were sent so far."""
    stored: list[StoredBucket] = field(default_factory=list)
    """Buckets that stay available for engines that restart later."""

    def begin(self, engines: Sequence[ReplicaClient]) -> None:
        """Begin the push on these engines, which then drop their old weights."""
        self.engines = engines
        self.call(Engine.begin_push, PushStart(self.version, self.id, self.in_flight))
        self.ready = self.settle()

    def call(self, method: Callable[..., Any], argument: Any) -> None:
        """Call a method on every engine, once all have replied to the last call. Does not wait.

        Raises:
            Exception: any error of an engine in the last call.
        """
        self.settle()
        self.pending = [engine.control(method, argument) for engine in self.engines]

    def settle(self) -> list[Any]:
        """Wait for the replies to the last call.

        Raises:
            Exception: any error of an engine.
        """
        values = [call.result() for call in self.pending]
        self.pending = ()
        return values

    def finish(self) -> Manifest:
        """End the push on every engine, and compare the tensors that arrived with those sent.

        Raises:
            WeightError: an engine received other tensors than were sent.
        """
        manifest = Manifest.of(self.version, self.specs)
        self.call(Engine.finish_push, manifest)
        for arrived in self.settle():
            if differences := manifest.differences(arrived):
                raise WeightError(f"Push of version {self.version}: {summary(differences)}.")
        return manifest

    def failures(self) -> list[Exception]:
        """Return the errors of the last call that have arrived. Does not wait."""
        errors = [call.exception() for call in self.pending if call.done()]
        return [error for error in errors if isinstance(error, Exception)]

    @contextmanager
    def preferring_engine_errors(self) -> Iterator[None]:
        """Replace a `WeightError` in this context by the error that ended an engine, if any."""
        try:
            yield
        except WeightError:
            deadline = time.monotonic() + REASON_S
            while True:
                failures = self.failures()
                for error in failures:
                    if not isinstance(error, WeightError):
                        raise error from None
                if len(failures) == len(self.pending) or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)


class ObjectTransport(Transport):
    """Transport by one `ray.put` per bucket. Engines on the same node read buckets without a copy.

    The sender keeps the buckets of a push until the next push starts. An engine that was lost can
    load them again after its restart.
    """

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[StoredBucket]:
        """Yield the buckets (see `Transport.buckets`). Engines load one while the next is put."""
        if workers.rank != 0:
            return
        with ThreadPoolExecutor(1) as beside:
            hosted = ((name, tensor.cpu()) for name, tensor in tensors)
            for group in grouped(hosted, bucket_bytes=self.bucket_bytes):
                parts = [as_bytes(tensor) for _, tensor in group]
                sums = beside.submit(checksums, parts)
                ref = ray.put(tuple(part.numpy() for part in parts))  # the only copy on CPUs
                yield StoredBucket(ref, specs_of(group, sums.result()))
                del group, parts  # free them before the next group is made


@contextmanager
def drained(named_tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust the iterator when the context ends, even after an error.

    Workers gather the tensors together, so the other workers would otherwise wait for this one.
    """
    tensors = iter(named_tensors)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


@contextmanager
def all_or_none(workers: Workers) -> Iterator[None]:
    """Make all workers fail if one of them fails in this context.

    Otherwise the other workers would wait for the failed one.

    Raises:
        WeightError: raised on the workers that did not fail themselves.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    messages = workers.gather(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message:
            raise WeightError(f"learner worker {rank} could not push the weights: {message}")
