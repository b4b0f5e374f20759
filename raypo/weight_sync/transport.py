"""The sender's side of a push of weights, and the transport through Ray's object store.

A push is the same conversation on every transport: rank 0 calls `begin_push` on all engines, then
`load_bucket` for one bucket after the other, and at last `finish_push`, which compares the
manifest. An engine serves again only after the last call, so a push that fails in the middle leaves
engines that refuse to sample.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from raypo.collectives import Workers
from raypo.config import InFlight
from raypo.pending import PendingPinned
from raypo.serving.client import Engines, PinnedEngines
from raypo.weights.bucket_size import BUCKET_BYTES
from raypo.weights.buckets import Specs, as_bytes, grouped, specs_of
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksums, summary
from raypo.weights.messages import (
    OfferedBucket,
    PushStart,
    Ready,
    Rendezvous,
    StoredBucket,
    WeightPush,
)
from raypo.weights.store import WeightSnapshot, WeightStore

REASON_S, POLL_S = 3.0, 0.05
"""Seconds until the end of an engine is known after its peers noticed it, and polling interval."""

NamedTensors = Iterable[tuple[str, Tensor]]


class Transport(Protocol):
    """Sends a weight version to all engines."""

    kept: WeightSnapshot | None
    """The last push that succeeded. None on ranks other than 0, and before the first push."""

    def push(
        self, named_tensors: NamedTensors, engines: Engines, *, version: int, workers: Workers
    ) -> None:
        """Send every tensor to every engine; all workers call it together, with equal tensors.

        Args:
            named_tensors: Whole tensors on any device, each unchanged while it is referenced.
            engines: All engines of a run.
            version: Version of the weights.
            workers: The workers that call this together.

        Raises:
            WeightError: on every worker, if a tensor did not arrive as it was sent.
        """
        ...


class ObjectTransport:
    """Transport through Ray's object store: one put for each bucket, read on the same node
    without a copy.

    The sender keeps the buckets of its last push until it starts the next one, so that an engine
    that was lost can load them again.
    """

    def __init__(
        self, *, in_flight: InFlight | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.kept: WeightSnapshot | None = None
        self.weight_store = WeightStore()
        self.in_flight: InFlight | None = in_flight
        self._bucket_bytes = bucket_bytes

    def push(
        self, named_tensors: NamedTensors, engines: Engines, *, version: int, workers: Workers
    ) -> None:
        """Push (see `Transport.push`); engines load a bucket while the next one is put."""
        with all_or_none(workers), drained(named_tensors) as tensors:
            if workers.rank == 0:
                self.kept = None
                self.weight_store.forget()  # frees the old version before the new one takes room
                self.kept = self._send(tensors, engines, version)

    def _send(self, tensors: NamedTensors, engines: Engines, version: int) -> WeightSnapshot:
        import ray

        conversation = Conversation(engines, version, self.in_flight)
        conversation.begin()
        buckets = []
        with ThreadPoolExecutor(1) as beside:
            hosted = ((name, tensor.cpu()) for name, tensor in tensors)
            for group in grouped(hosted, bucket_bytes=self._bucket_bytes):
                parts = [as_bytes(tensor) for _, tensor in group]
                sums = beside.submit(checksums, parts)
                ref = ray.put(tuple(part.numpy() for part in parts))  # the only copy on CPUs
                buckets.append(StoredBucket(ref, specs_of(group, sums.result())))
                conversation.settle()
                conversation.offer(buckets[-1], buckets[-1].specs)
                del group, parts  # before the next ones are made
        conversation.settle()
        push = WeightPush(version, conversation.finish(), tuple(buckets), conversation.id)
        return self.weight_store.keep(push, id=push.id)


@dataclass
class Conversation:
    """Rank 0's side of a push: it calls all engines and collects their replies."""

    engines: Engines
    version: int
    in_flight: InFlight | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identity of the push."""
    pending: Sequence[PendingPinned[object]] = ()
    """The last call, to each engine."""
    _specs: list[TensorSpec] = field(default_factory=list)
    _up: PinnedEngines | None = None
    """The engines that were up when the push began."""

    def begin(self) -> list[Ready]:
        """Tell all engines that a push begins, so that they drop their weights; return replies."""
        self._up = self.engines.pinned()
        start = PushStart(self.version, self.id, self.in_flight)
        return [call.result() for call in self._members.begin_push(start)]

    def offer(self, bucket: OfferedBucket, specs: Specs) -> None:
        """Send a bucket to all engines; `settle` waits until they have loaded it."""
        self._specs += specs
        self.pending = self._members.load_bucket(bucket)

    def settle(self) -> None:
        """Wait for the replies to the last call.

        Raises:
            Exception: any error of an engine.
        """
        for call in self.pending:
            call.result()
        self.pending = ()

    def failures(self) -> list[Exception]:
        """Return the errors of the last call that have arrived. Does not wait."""
        return [error for each in self.pending if (error := each.failure()) is not None]

    @contextmanager
    def engines_reasons_first(self) -> Iterator[None]:
        """Raise the error that ended an engine in place of the errors that it caused elsewhere."""
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

    def finish(self) -> Manifest:
        """Compare what was sent with what arrived, on every engine.

        Raises:
            WeightError: an engine received other tensors than were sent.
        """
        manifest = Manifest.of(self.version, self._specs)
        for call in self._members.finish_push(manifest):
            differences = manifest.differences(call.result())
            if differences:
                raise WeightError(f"Push of version {self.version}: {summary(differences)}.")
        return manifest

    def join_group(self, rendezvous: Rendezvous) -> None:
        """Have all engines join a broadcast group; `settle` waits until they have."""
        self.pending = self._members.join_group(rendezvous)

    @property
    def _members(self) -> PinnedEngines:
        assert self._up is not None, "a conversation begins with `begin`"
        return self._up


@contextmanager
def drained(named_tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Iterate to the end even after an error, because other workers gather the same tensors."""
    tensors = iter(named_tensors)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


@contextmanager
def all_or_none(workers: Workers) -> Iterator[None]:
    """Make all workers fail if one does, so that none waits for another.

    Raises:
        WeightError: on the workers that did not fail themselves.
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
