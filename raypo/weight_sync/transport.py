"""Weight transports: the base class, and the transport through Ray's object store.

Rank 0 calls the engines: `begin_push`, then `load_bucket` for each bucket, and finally
`finish_push`, which compares the manifest. An engine serves requests again only after the last
call, so engines refuse to sample after a push that failed half-way. docs/architecture.md lists the
functions between a recipe and vLLM's `load_weights`.
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
from raypo.weights.buckets import as_bytes, group_by_size, specs_of
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksums, summary
from raypo.weights.messages import OfferedBucket, PushStart, Ready, StoredBucket, WeightPush
from raypo.weights.store import WeightSnapshot, WeightStore

RETRY_S = 0.2
"""Seconds to wait before a push is repeated."""
REASON_S, POLL_S = 3.0, 0.05
"""Seconds to wait for a failed engine's own error after its peers have noticed the failure, and the
polling interval in seconds."""

NamedTensors = Iterable[tuple[str, Tensor]]


class Transport:
    """Base class of the transports. They differ in the buckets that engines load (`buckets`)."""

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
        self.last_push: WeightSnapshot | None = None
        """Snapshot of the last successful push. None before the first push and on ranks above 0."""

    def push(
        self,
        weights: Callable[[], NamedTensors],
        engines: EngineClient,
        *,
        version: int,
        workers: Workers,
    ) -> None:
        """Send every tensor to every engine. All workers call it together, with equal tensors.

        If an engine is lost during the push, the push is repeated to the remaining engines.
        Afterwards, each request of rank 0 requires the pushed weights, so a restarted engine loads
        them first.

        Args:
            weights: Function that yields whole tensors on any device. A tensor must not change
                while it is referenced.
            engines: All engines of the run. Engines that are down are skipped.
            version: Version of the weights.
            workers: The workers that call this together. Rank 0 calls the engines.

        Raises:
            WeightError: raised on every worker if a received tensor differs from the sent tensor.
        """
        while True:
            session = PushSession(version, self.in_flight)
            try:
                with fail_together(workers):
                    if workers.rank == 0:
                        engines.require()
                        self.last_push = None
                        self.weight_store.forget()  # free the old version's memory first
                        session.begin(engines.handle.up())
                with fail_together(workers), exhaust_on_exit(weights()) as tensors:
                    for bucket in self.buckets(tensors, session, workers):
                        session.specs += bucket.specs
                        session.call(Engine.load_bucket, bucket)
                        if isinstance(bucket, StoredBucket):
                            session.stored.append(bucket)
                    if workers.rank == 0:
                        manifest = session.finish()
                        self.last_push = WeightSnapshot(session.id)
                        if session.stored:
                            push = WeightPush(version, manifest, tuple(session.stored), session.id)
                            self.last_push = self.weight_store.keep(push, id=push.id)
                break
            except Exception as error:  # all workers fail together
                if not workers.broadcast(isinstance(error, ReplicaLost)):
                    raise
                time.sleep(RETRY_S)
        if self.last_push is not None:
            engines.require(self.last_push)

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[OfferedBucket]:
        """Yield all tensors in buckets on rank 0, and nothing on other ranks.

        All workers iterate together. Engines start to load a bucket when it is yielded. Before an
        implementation changes the bucket's memory, it must wait for the engines
        (`PushSession.wait_for_replies`).
        """
        raise NotImplementedError


@dataclass
class PushSession:
    """Rank 0's side of a push. It calls the participating engines and collects their replies."""

    version: int
    in_flight: InFlight | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique id of the push."""
    engines: Sequence[ReplicaClient] = ()
    """Participating engines: all engines that were up when the push started."""
    ready: list[Ready] = field(default_factory=list)
    """The engines' replies to `begin_push`."""
    pending: Sequence[Future[Any]] = ()
    """Futures of the last call, one per engine."""
    specs: list[TensorSpec] = field(default_factory=list)
    """Specs of the tensors that have been sent so far."""
    stored: list[StoredBucket] = field(default_factory=list)
    """Sent buckets that stay available for engines that restart later."""

    def begin(self, engines: Sequence[ReplicaClient]) -> None:
        """Start the push on these engines, which then drop their old weights."""
        self.engines = engines
        self.call(Engine.begin_push, PushStart(self.version, self.id, self.in_flight))
        self.ready = self.wait_for_replies()

    def call(self, method: Callable[..., Any], argument: Any) -> None:
        """Wait for the replies to the last call, then call a method on every engine.

        Raises:
            Exception: the error of an engine in the last call.
        """
        self.wait_for_replies()
        self.pending = [engine.control(method, argument) for engine in self.engines]

    def wait_for_replies(self) -> list[Any]:
        """Wait for the replies to the last call, and return them.

        Raises:
            Exception: the error of an engine.
        """
        values = [call.result() for call in self.pending]
        self.pending = ()
        return values

    def finish(self) -> Manifest:
        """Finish the push on every engine, and compare the received tensors with the sent tensors.

        Raises:
            WeightError: the tensors that an engine received differ from the sent tensors.
        """
        manifest = Manifest.of(self.version, self.specs)
        self.call(Engine.finish_push, manifest)
        for arrived in self.wait_for_replies():
            if differences := manifest.differences(arrived):
                raise WeightError(f"Push of version {self.version}: {summary(differences)}.")
        return manifest

    def failures(self) -> list[Exception]:
        """Return the errors of the last call so far. Does not wait."""
        errors = [call.exception() for call in self.pending if call.done()]
        return [error for error in errors if isinstance(error, Exception)]

    @contextmanager
    def prefer_engine_errors(self) -> Iterator[None]:
        """Replace a `WeightError` raised in this context by the failed engine's error, if any."""
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
    """Transport with one `ray.put` per bucket. Engines on the same node read it without a copy.

    The sender keeps the buckets of a push until the next push starts, so that a lost engine can
    load them again after its restart.
    """

    def buckets(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> Iterator[StoredBucket]:
        """Yield the buckets. Engines load one bucket while the next one is put.

        See `Transport.buckets`.
        """
        if workers.rank != 0:
            return
        with ThreadPoolExecutor(1) as hash_executor:
            cpu_tensors = ((name, tensor.cpu()) for name, tensor in tensors)
            for group in group_by_size(cpu_tensors, bucket_bytes=self.bucket_bytes):
                parts = [as_bytes(tensor) for _, tensor in group]
                sums = hash_executor.submit(checksums, parts)
                ref = ray.put(tuple(part.numpy() for part in parts))  # the only copy on CPUs
                yield StoredBucket(ref, specs_of(group, sums.result()))
                del group, parts  # free the memory before the next group is gathered


@contextmanager
def exhaust_on_exit(named_tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Exhaust the iterator when the context ends, even after an error.

    The workers gather the tensors together, so otherwise the other workers would wait for this one.
    """
    tensors = iter(named_tensors)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


@contextmanager
def fail_together(workers: Workers) -> Iterator[None]:
    """Make all workers fail if one of them fails in this context.

    Otherwise the other workers would wait for the failed worker.

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
