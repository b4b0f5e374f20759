"""Weights by broadcast: learner rank 0 and the engines' workers as one group of processes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from raypo.collectives import Workers
from raypo.concurrency import daemon_future
from raypo.config import InFlight
from raypo.plan.sizes import BUCKET_BYTES
from raypo.weights.buckets import Staged, stage
from raypo.weights.manifest import WeightError
from raypo.weights.messages import Backend, BroadcastBucket, Rendezvous
from raypo.weights.store import Kept
from raypo.weights.transport import (
    Conversation,
    NamedTensors,
    PushedEngines,
    all_or_none,
    drained,
)

POLL_S = 0.001
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
POLLS_BETWEEN_QUESTIONS = 50
"""Polls of the broadcast before the receivers' answers are looked at."""


class Group:
    """One process's place in a broadcast group."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, store: Any, device: Any) -> None:
        """Join, and wait until all others have joined.

        Raises:
            WeightError: not all of them came in time.
        """
        self.rendezvous, self.device = rendezvous, torch.device(device)
        self._store = store  # lives as long as the group
        try:
            self._backend: Any = _backend(rendezvous, rank, store, self.device)
        except RuntimeError as error:
            raise WeightError(
                f"broadcast group {rendezvous.epoch}: not all of its {rendezvous.size} processes "
                f"met within {rendezvous.timeout_s:g} s ({error}). {_REMEDY}"
            ) from error

    @classmethod
    def join(cls, rendezvous: Rendezvous, *, device: Any) -> Group:
        """Join as one of the receivers."""
        store = _store(rendezvous.host, rendezvous.port, rendezvous.timeout_s, is_host=False)
        rank = store.add(_key(rendezvous, "joined"), 1)
        return cls(rendezvous, rank=rank, store=store, device=device)

    def receive(self, bucket: BroadcastBucket) -> Staged:
        """The bucket, in memory of its own.

        Raises:
            WeightError: as `broadcast`, or the bucket is not this group's.
        """
        if bucket.epoch != self.rendezvous.epoch:
            raise WeightError(
                f"a bucket of broadcast group {bucket.epoch} cannot reach a member of group "
                f"{self.rendezvous.epoch}. Push the weights again."
            )
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        self.broadcast(flat, is_in_vain=lambda: False)
        return Staged(flat, bucket.entries)

    def leave(self) -> None:
        """Give up what is under way and close all connections; safe to call in any state."""
        self._backend.abort()

    def broadcast(self, flat: Tensor, *, is_in_vain: Callable[[], bool]) -> None:
        """Broadcast a bucket from rank 0 to all others.

        Args:
            flat: uint8 [bytes] on this group's device.
            is_in_vain: Asked while it waits: whether a receiver has given up.

        Raises:
            WeightError: a member is gone, or it took too long. The group is of no use afterwards.
        """
        limit = self.rendezvous.timeout_s
        deadline = time.monotonic() + limit
        try:
            work = self._backend.broadcast(flat, 0)
            for poll in itertools.count(1):
                if work.is_completed():
                    break
                if poll % POLLS_BETWEEN_QUESTIONS == 0 and is_in_vain():
                    raise WeightError("a receiver gave up.")
                if time.monotonic() > deadline:
                    raise WeightError(f"time-out: not done in {limit:g} s.")
                time.sleep(POLL_S)
            work.wait()
            told = (
                self._backend.get_error().name if self.rendezvous.backend == "nccl" else "SUCCESS"
            )
            if told != "SUCCESS":  # of a lost peer, whose work counts as completed
                raise WeightError(f"NCCL: {told}.")
        except RuntimeError as error:  # WeightError is one
            self.leave()
            raise WeightError(
                f"broadcast group {self.rendezvous.epoch} ({self.rendezvous.backend}): {error} "
                f"{_REMEDY}"
            ) from error


class BroadcastTransport:
    """NCCL between the learner's rank 0 and engines on devices of their own; gloo without GPUs.

    A receiver that died, came back or joined is noticed when a push begins, and the next group
    is formed then. Nothing is kept on the way: a replacement gets its weights with the next push.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        device: torch.device | str,
        host: str,
        timeout_s: float,
        in_flight: InFlight | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """No group yet.

        Args:
            backend: nccl for GPUs, gloo for CPUs.
            device: This process's, on which buckets are filled.
            host: This node's address, as the engines see it.
            timeout_s: Seconds that joining, and the broadcast of one bucket, may take.
            in_flight: As `PushStart.in_flight`.
            bucket_bytes: Size of a bucket in bytes.
        """
        self.kept: Kept | None = None
        self._backend: Backend = backend
        self._device, self._host = torch.device(device), host
        self._timeout_s, self._bucket_bytes = timeout_s, bucket_bytes
        self._in_flight: InFlight | None = in_flight
        self._group: Group | None = None
        self._epoch = 0

    def push(
        self, named_tensors: NamedTensors, engines: PushedEngines, *, version: int, workers: Workers
    ) -> None:
        """As `Transport.push`."""
        with all_or_none(workers), drained(named_tensors) as tensors:
            if workers.rank == 0:
                try:
                    self._send(tensors, engines, version)
                except BaseException:
                    self._leave()
                    raise

    def _send(self, tensors: NamedTensors, engines: PushedEngines, version: int) -> None:
        conversation = Conversation(engines, version, self._in_flight)
        with conversation.engines_reasons_first():
            group = self._group_with(conversation)
            for staged in stage(tensors, bucket_bytes=self._bucket_bytes, device=self._device):
                bucket = BroadcastBucket(self._epoch, len(staged.flat), staged.entries)
                conversation.offer(bucket, staged.specs)
                group.broadcast(staged.flat, is_in_vain=lambda: bool(conversation.failures()))
                conversation.settle()
        conversation.finish()
        self.kept = Kept(conversation.id)

    def _group_with(self, conversation: Conversation) -> Group:
        """The group as it is where all engines are in it, else the next one."""
        ready = conversation.begin()
        size = 1 + sum(each.num_workers for each in ready)
        is_whole = all(each.epoch == self._epoch for each in ready)
        if self._group is not None and is_whole and self._group.rendezvous.size == size:
            return self._group
        self._leave()
        self._epoch += 1
        store = _store(self._host, 0, self._timeout_s, is_host=True)
        rendezvous = Rendezvous(
            self._epoch, self._host, store.port, size, self._backend, self._timeout_s
        )
        conversation.join_group(rendezvous)
        self._group = Group(rendezvous, rank=0, store=store, device=self._device)
        conversation.settle()
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group = None


_REMEDY = (
    "An engine died or cannot be reached: look at its log. If all are alive, set NCCL_DEBUG=INFO "
    "and NCCL_SOCKET_IFNAME to the interface that joins the nodes, raise "
    "rollout.engine.push_timeout_s, or set rollout.engine.transport to object."
)


def _store(host: str, port: int, timeout_s: float, *, is_host: bool) -> Any:
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        is_master=is_host,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _key(rendezvous: Rendezvous, name: str) -> str:
    return f"group{rendezvous.epoch}/{name}"


def _backend(rendezvous: Rendezvous, rank: int, store: Any, device: torch.device) -> Any:
    """A process group of its own, unknown to torch.distributed's default one."""
    prefixed = PrefixStore(_key(rendezvous, rendezvous.backend), store)
    limit = timedelta(seconds=rendezvous.timeout_s)
    if rendezvous.backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, rank, rendezvous.size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 4 * limit  # NCCL's watchdog ends the process; ours comes first
    with _lost_peers_told():
        backend = dist.ProcessGroupNCCL(prefixed, rank, rendezvous.size, options)
    connect(backend, device, rendezvous.timeout_s)
    return backend


@contextmanager
def _lost_peers_told() -> Iterator[None]:
    """A group that is made here says that a peer on another node is lost.

    As Ray Train sets it, the process ends instead, which is a learner's, with its training.
    """
    before = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = before


def connect(backend: Any, device: torch.device, timeout_s: float) -> None:
    """Have NCCL make its connections now, which waits for all members and knows no time-out.

    Raises:
        RuntimeError: one did not come in time, or NCCL's own error.
    """
    connected = daemon_future(
        lambda: backend.eager_connect_single_device(device), name="raypo-nccl"
    )
    try:
        connected.result(timeout_s)
    except TimeoutError:
        Thread(target=backend.abort, daemon=True).start()  # it may wait for the other thread
        raise RuntimeError("a member did not connect") from None
