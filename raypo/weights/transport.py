"""Roads that buckets take from the learner to the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from raypo.weights.buckets import Bucket
from raypo.weights.manifest import Manifest, TensorSpec


@dataclass(frozen=True)
class WeightPush:
    """One weight version on its way: plain data that fits into a remote call."""

    version: int
    manifest: Manifest
    transport: str
    """Which transport receives it, a key of TRANSPORTS."""
    refs: tuple[Any, ...]
    """One a bucket; what they are is the transport's affair."""

    def __repr__(self) -> str:
        return f"WeightPush(v{self.version}, {len(self.manifest.tensors)} tensors)"


class Transport(Protocol):
    """Moves buckets from one sender to any number of receivers."""

    def send(self, buckets: Iterable[Bucket], *, version: int) -> WeightPush:
        """Take the buckets, one at a time, and say how to get them."""
        ...

    def receive(self, push: WeightPush) -> Iterator[Bucket]:
        """The buckets of a push, in the order they were sent."""
        ...


class ObjectTransport:
    """Through the Ray object store: one put a bucket, read without a copy on the same node.

    The sender keeps the buckets of its last push until it starts the next one, so that an engine
    that was lost can load them again.
    """

    def __init__(self) -> None:
        self.last_push: WeightPush | None = None

    def send(self, buckets: Iterable[Bucket], *, version: int) -> WeightPush:
        """Put each bucket into the object store of this node."""
        import ray

        self.last_push = None  # frees the old version before the new one takes room
        self.last_push = _send(buckets, version=version, transport="object", put=ray.put)
        return self.last_push

    def receive(self, push: WeightPush) -> Iterator[Bucket]:
        """Buckets on shared read-only memory; fetched from another node when they lie there."""
        import ray

        for ref in push.refs:
            yield ray.get(ref)


class LocalTransport:
    """Within one process; the buckets themselves are the references."""

    def send(self, buckets: Iterable[Bucket], *, version: int) -> WeightPush:
        """Hold the buckets in the push."""
        return _send(buckets, version=version, transport="local", put=lambda bucket: bucket)

    def receive(self, push: WeightPush) -> Iterator[Bucket]:
        """The very buckets that were sent."""
        yield from push.refs


TRANSPORTS: dict[str, type[Transport]] = {"object": ObjectTransport, "local": LocalTransport}


def receive(push: WeightPush) -> Iterator[Bucket]:
    """The buckets of a push, by the transport that it names."""
    return TRANSPORTS[push.transport]().receive(push)


def _send(buckets: Iterable[Bucket], *, version: int, transport: str, put: Any) -> WeightPush:
    specs: list[TensorSpec] = []
    refs = []
    for bucket in buckets:
        specs += [spec for spec, _ in bucket.entries]
        refs.append(put(bucket))
    return WeightPush(version, Manifest.of(version, specs), transport, tuple(refs))
