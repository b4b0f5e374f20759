"""Process group for broadcasting weights: learner rank 0 and the engines' workers."""

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

from raypo.concurrency import daemon_future
from raypo.weights.buckets import StagedBucket
from raypo.weights.manifest import WeightError
from raypo.weights.messages import BroadcastBucket, Rendezvous

POLL_S = 0.001
"""Interval in seconds at which an unfinished broadcast is polled."""
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
POLLS_BETWEEN_CHECKS = 50
"""Number of polls between two checks for failed receivers."""


class Group:
    """Membership of this process in a broadcast group."""

    def __init__(self, rendezvous: Rendezvous, *, rank: int, store: Any, device: Any) -> None:
        """Join the group, and wait until all other members have joined.

        Raises:
            WeightError: a process did not join in time.
        """
        self.rendezvous, self.device = rendezvous, torch.device(device)
        self._store = store  # the store must live as long as the group
        try:
            self._backend: Any = _backend(rendezvous, rank, store, self.device)
        except RuntimeError as error:
            raise WeightError(
                f"broadcast group {rendezvous.epoch}: not all of its {rendezvous.size} processes "
                f"met within {rendezvous.timeout_s:g} s ({error}). {_REMEDY}"
            ) from error

    @classmethod
    def join(cls, rendezvous: Rendezvous, *, device: Any) -> Group:
        """Join the group as a receiver."""
        store = group_store(rendezvous.host, rendezvous.port, rendezvous.timeout_s, is_host=False)
        rank = store.add(_key(rendezvous, "joined"), 1)
        return cls(rendezvous, rank=rank, store=store, device=device)

    def receive(self, bucket: BroadcastBucket) -> StagedBucket:
        """Receive a bucket into new memory.

        Raises:
            WeightError: the bucket belongs to another group, or the broadcast failed (`broadcast`).
        """
        if bucket.epoch != self.rendezvous.epoch:
            raise WeightError(
                f"a bucket of broadcast group {bucket.epoch} cannot reach a member of group "
                f"{self.rendezvous.epoch}. Push the weights again."
            )
        flat = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
        self.broadcast(flat, has_failed=lambda: False)
        return StagedBucket(flat, bucket.entries)

    def leave(self) -> None:
        """Abort the current operation and close all connections. Safe to call in any state."""
        self._backend.abort()

    def broadcast(self, flat: Tensor, *, has_failed: Callable[[], bool]) -> None:
        """Broadcast a bucket from rank 0 to all other members.

        Args:
            flat: Bytes of the bucket, uint8 [bytes], on the group's device.
            has_failed: Function that returns True if a receiver has failed. It is polled during the
                broadcast.

        Raises:
            WeightError: a member was lost, or the broadcast timed out. The group can no longer be
                used.
        """
        timeout_s = self.rendezvous.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            work = self._backend.broadcast(flat, 0)
            for poll in itertools.count(1):
                if work.is_completed():
                    break
                if poll % POLLS_BETWEEN_CHECKS == 0 and has_failed():
                    raise WeightError("a receiver gave up.")
                if time.monotonic() > deadline:
                    raise WeightError(f"time-out: not done in {timeout_s:g} s.")
                time.sleep(POLL_S)
            work.wait()
            is_nccl = self.rendezvous.backend == "nccl"
            state = self._backend.get_error().name if is_nccl else "SUCCESS"
            if state != "SUCCESS":  # after the loss of a peer, NCCL reports its work as completed
                raise WeightError(f"NCCL: {state}.")
        except RuntimeError as error:  # includes WeightError
            self.leave()
            raise WeightError(
                f"broadcast group {self.rendezvous.epoch} ({self.rendezvous.backend}): {error} "
                f"{_REMEDY}"
            ) from error


_REMEDY = (
    "An engine died or cannot be reached: look at its log. If all are alive, set NCCL_DEBUG=INFO "
    "and NCCL_SOCKET_IFNAME to the interface that joins the nodes, raise "
    "rollout.engine.push_timeout_s, or set rollout.engine.transport to object."
)


def group_store(host: str, port: int, timeout_s: float, *, is_host: bool) -> Any:
    """Open the store through which the members of a group find each other."""
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
    """Create a process group that is independent of torch.distributed's default process group."""
    prefixed_store = PrefixStore(_key(rendezvous, rendezvous.backend), store)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    if rendezvous.backend == "gloo":
        return dist.ProcessGroupGloo(prefixed_store, rank, rendezvous.size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 4 * timeout  # NCCL's watchdog kills the process, so time out first
    with _report_lost_peers():
        backend = dist.ProcessGroupNCCL(prefixed_store, rank, rendezvous.size, options)
    connect(backend, device, rendezvous.timeout_s)
    return backend


@contextmanager
def _report_lost_peers() -> Iterator[None]:
    """Make groups that are created in this context report a lost peer as an error.

    With the value that Ray Train sets for `ERROR_HANDLING`, NCCL would kill the learner's process.
    """
    previous = os.environ.get(ERROR_HANDLING)
    os.environ[ERROR_HANDLING] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[ERROR_HANDLING]
        else:
            os.environ[ERROR_HANDLING] = previous


def connect(backend: Any, device: torch.device, timeout_s: float) -> None:
    """Make NCCL connect to all members now. NCCL itself has no timeout for this.

    Raises:
        RuntimeError: a member did not connect in time, or NCCL raised an error.
    """
    connection = daemon_future(
        lambda: backend.eager_connect_single_device(device), name="raypo-nccl"
    )
    try:
        connection.result(timeout_s)
    except TimeoutError:
        Thread(target=backend.abort, daemon=True).start()  # abort may wait for `connection`
        raise RuntimeError("a member did not connect") from None
