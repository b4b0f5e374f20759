"""The broadcast group by gloo, its members in threads: who comes, who dies, who is late."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from raypo.collectives import Workers
from raypo.deployment.handle import local_handle
from raypo.serving.client import EngineClient
from raypo.weight_sync.broadcast import BroadcastTransport, check_cumem
from raypo.weights.buckets import unpack
from raypo.weights.group import Group, connect
from raypo.weights.manifest import Manifest, TensorSpec, WeightError
from raypo.weights.messages import (
    Backend,
    BroadcastBucket,
    OfferedBucket,
    PushStart,
    Ready,
    Rendezvous,
)

LIMIT_S = 2.0
TENSORS = {f"w{i}": torch.arange(50.0) + i for i in range(6)}


class Receiver:
    """What an engine does with a push, without a model."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.epochs: list[int] = []
        self.start: PushStart | None = None
        self._arrived: list[TensorSpec] = []

    def begin_push(self, start: PushStart) -> Ready:
        self.start, self.version, self._arrived = start, None, []
        return Ready(1, self.group.rendezvous.epoch if self.group else None)

    def join_group(self, rendezvous: Rendezvous) -> None:
        self.group = Group.join(rendezvous, device="cpu")
        self.epochs.append(rendezvous.epoch)

    def load_bucket(self, bucket: OfferedBucket) -> None:
        assert self.group is not None
        assert isinstance(bucket, BroadcastBucket)
        received = self.group.receive(bucket)
        self.tensors |= dict(unpack(received, verify=True))
        self._arrived += received.specs

    def finish_push(self, manifest: Manifest) -> Manifest:
        self.version = manifest.version
        return Manifest.of(manifest.version, self._arrived)


def client(*receivers: Any) -> EngineClient:
    return EngineClient(local_handle(*receivers))


def transport(
    timeout_s: float = LIMIT_S, backend: Backend = "gloo", **options: Any
) -> BroadcastTransport:
    return BroadcastTransport(
        backend=backend,
        device="cpu",
        host="127.0.0.1",
        timeout_s=timeout_s,
        bucket_bytes=512,
        **options,
    )


def push(sender: BroadcastTransport, version: int, *receivers: Receiver) -> None:
    sender.push(TENSORS.items, client(*receivers), version=version, workers=Workers())


def test_every_receiver_gets_every_tensor_and_the_group_stays():
    sender, receivers = transport(), [Receiver(), Receiver()]
    for version in (1, 2):
        push(sender, version, *receivers)
    for receiver in receivers:
        assert receiver.version == 2
        assert receiver.epochs == [1], "the second push needs no new group"
        assert all(torch.equal(receiver.tensors[name], TENSORS[name]) for name in TENSORS)


def test_what_begins_a_push_says_what_becomes_of_requests_in_flight():
    receiver, sender = Receiver(), transport(in_flight="keep")
    push(sender, 1, receiver)
    assert receiver.start is not None
    assert sender.last_push is not None
    assert receiver.start == PushStart(1, sender.last_push.id, "keep")


def test_a_group_that_lost_or_gained_a_member_is_succeeded_by_another():
    sender, first, second = transport(), Receiver(), Receiver()
    push(sender, 1, first, second)
    push(sender, 2, first)
    replacement = Receiver()
    push(sender, 3, first, replacement)
    assert first.epochs == [1, 2, 3]
    assert replacement.epochs == [3]
    assert (first.version, second.version, replacement.version) == (3, 1, 3)


class Refuses(Receiver):
    """Fails before it takes part in the broadcast, as an engine that is broken does."""

    def load_bucket(self, bucket: OfferedBucket) -> None:
        raise RuntimeError("this engine cannot go on")


def test_a_receiver_that_gives_up_ends_the_push_before_the_time_out():
    receivers = [Receiver(), Refuses()]
    with pytest.raises(RuntimeError, match=r"^this engine cannot go on"):
        push(transport(10 * LIMIT_S), 1, *receivers)
    assert [receiver.version for receiver in receivers] == [None, None]


class Late(Receiver):
    """Accepts the bucket and never takes part: a process that hangs."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__()
        self._released = released

    def load_bucket(self, bucket: OfferedBucket) -> None:
        self._released.wait(10 * LIMIT_S)


def test_a_receiver_that_hangs_is_told_after_the_time_out_with_the_remedy():
    released = threading.Event()
    with pytest.raises(WeightError, match=r"time-out.*NCCL_SOCKET_IFNAME.*push_timeout_s"):
        push(transport(), 1, Late(released))
    released.set()


class Absent(Receiver):
    """Never joins."""

    def join_group(self, rendezvous: Rendezvous) -> None:
        pass


def test_a_group_that_does_not_meet_is_told():
    with pytest.raises(WeightError, match="not all of its 2 processes met within 2 s"):
        push(transport(), 1, Absent())


def test_a_member_that_never_connects_is_waited_for_no_longer_than_is_said():
    """As NCCL where a receiver dies between the meeting and the connection."""

    class Stuck:
        aborted, released = threading.Event(), threading.Event()

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.released.wait(60.0)

        def abort(self) -> None:
            self.aborted.set()

    stuck = Stuck()
    with pytest.raises(RuntimeError, match="a member did not connect"):
        connect(stuck, torch.device("cpu"), timeout_s=0.05)
    assert stuck.aborted.wait(10.0)
    stuck.released.set()


@pytest.mark.parametrize("how", ["leaves", "sends another group's bucket"])
def test_a_receiver_notices_that_the_sender_is_gone(how: str):
    sender, receiver = transport(), Receiver()
    push(sender, 1, receiver)
    assert sender._group is not None
    assert receiver.group is not None
    epoch = receiver.group.rendezvous.epoch
    if how == "leaves":
        sender._group.leave()
        sender._group = None
        message = r"broadcast group 1 \(gloo\)"
    else:
        epoch, message = 7, "a bucket of broadcast group 7 cannot reach a member of group 1"
    with pytest.raises(WeightError, match=message):
        receiver.load_bucket(BroadcastBucket(epoch, 64, ()))


def failing_tensors(where: int) -> Any:
    for number, item in enumerate(TENSORS.items()):
        if number == where:
            raise ValueError("the learner broke")
        yield item


def test_the_next_push_after_one_that_broke_off_forms_a_new_group():
    sender, receiver = transport(), Receiver()
    with pytest.raises(ValueError, match="the learner broke"):
        sender.push(lambda: failing_tensors(4), client(receiver), version=1, workers=Workers())
    assert receiver.version is None
    push(sender, 2, receiver)
    assert (receiver.version, receiver.epochs) == (2, [1, 2])


def test_corrupted_bytes_end_the_push(monkeypatch: pytest.MonkeyPatch):
    send = Group.broadcast

    def send_changed(group: Group, flat: torch.Tensor, **options: Any) -> None:
        flat[3] ^= 1
        send(group, flat, **options)

    monkeypatch.setattr(Group, "broadcast", send_changed)
    receiver = Receiver()
    with pytest.raises(WeightError, match="w0: the bytes that arrived do not have the checksum"):
        push(transport(), 1, receiver)
    assert receiver.version is None


def test_an_engine_with_another_value_of_ncclcumem_is_refused_before_nccl_connects():
    check_cumem("0", ["0", "0"])
    with pytest.raises(WeightError, match=r"NCCL_CUMEM_ENABLE \(0 in .*, unset in engine 1\)"):
        check_cumem("0", ["0", None])
    assert Ready.merged([Ready(1, 3, ("a",), "1"), Ready(1, 3, ("b",), "1")]) == Ready(
        2, 3, ("a", "b"), "1"
    )


def test_rank_0_asks_before_it_opens_a_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")

    class Other(Receiver):
        def begin_push(self, start: PushStart) -> Ready:
            return Ready(1, None, (), "1")

    with pytest.raises(WeightError, match="1 in engine 0"):
        push(transport(backend="nccl"), 1, Other())
