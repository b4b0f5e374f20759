"""Weight transport through Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import ray
from torch import Tensor

from raypo.collectives import Workers
from raypo.weight_sync.transport import PushSession, Transport
from raypo.weights.buckets import as_bytes, grouped, specs_of
from raypo.weights.manifest import checksums
from raypo.weights.messages import StoredBucket


class ObjectTransport(Transport):
    """One put for each bucket, which engines on the same node read without a copy.

    The sender keeps the buckets of its last push until it starts the next one, so that an engine
    that was lost can load them again.
    """

    def send(
        self, tensors: Iterator[tuple[str, Tensor]], session: PushSession, workers: Workers
    ) -> list[StoredBucket]:
        """Send from rank 0 (see `Transport.send`). Engines load a bucket while the next is put."""
        buckets: list[StoredBucket] = []
        if workers.rank != 0:
            return buckets
        with ThreadPoolExecutor(1) as beside:
            hosted = ((name, tensor.cpu()) for name, tensor in tensors)
            for group in grouped(hosted, bucket_bytes=self.bucket_bytes):
                parts = [as_bytes(tensor) for _, tensor in group]
                sums = beside.submit(checksums, parts)
                ref = ray.put(tuple(part.numpy() for part in parts))  # the only copy on CPUs
                buckets.append(StoredBucket(ref, specs_of(group, sums.result())))
                session.settle()
                session.offer(buckets[-1], buckets[-1].specs)
                del group, parts  # before the next ones are made
        session.settle()
        return buckets
