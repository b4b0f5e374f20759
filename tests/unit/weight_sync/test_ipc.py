"""Pushes by CUDA IPC without a GPU: two learner workers in threads, memory that is shared anyway.

What CUDA itself does is left to tests/gpu: here a handle opens to the sender's own tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.weight_sync import ipc
from raypo.weight_sync.ipc import IpcTransport
from raypo.weights.buckets import stage, unpack
from raypo.weights.manifest import Manifest, TensorSpec, WeightError
from raypo.weights.messages import IpcBucket, OfferedBucket, PushStart, Ready, Rendezvous
from tests.unit.weight_sync.test_broadcast import client

GPUS = ("GPU-0", "GPU-1")
WAIT_S = 20.0
WEIGHTS = {f"w{number}": torch.full((10,), float(number)) for number in range(7)}


@dataclass(frozen=True)
class SharedAnyway:
    """Stands for a handle of CUDA's."""

    flat: Tensor

    @classmethod
    def of(cls, flat: Tensor) -> SharedAnyway:
        return cls(flat)

    def open(self, device: Any) -> Tensor:
        return self.flat


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "CudaHandle", SharedAnyway)
    monkeypatch.setattr(ipc, "device_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def on_cpu(tensors: Any, *, bucket_bytes: int, device: Any) -> Any:
        return stage(tensors, bucket_bytes=bucket_bytes)

    monkeypatch.setattr(ipc, "stage", on_cpu)


@dataclass
class Together:
    """Learner workers that are threads: each gathers what all have passed."""

    count: int = 2
    passed: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.passed[rank] = value
        self.barrier.wait(WAIT_S)
        gathered = [self.passed[number] for number in range(self.count)]
        self.barrier.wait(WAIT_S)
        return gathered


@dataclass(frozen=True)
class InThread(Workers):
    """The learner workers as the one in this thread sees them."""

    together: Together = field(default_factory=Together)

    def gather(self, value: Any) -> list[Any]:
        return self.together.gather(self.rank, value)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


class Engine:
    """A vLLM worker on each of some GPUs, which reads the bucket there."""

    def __init__(self, gpus: tuple[str, ...] = GPUS) -> None:
        self._gpus = gpus
        self.handed_out: set[str] = set()
        self.held: dict[str, dict[str, Tensor]] = {}
        self.version: int | None = None
        self.num_buckets = 0
        self._specs: list[TensorSpec] = []

    def begin_push(self, start: PushStart) -> Ready:
        self.held, self.version, self._specs = {gpu: {} for gpu in self._gpus}, None, []
        return Ready(len(self._gpus), None, self._gpus)

    def join_group(self, rendezvous: Rendezvous) -> None:
        raise NotImplementedError("IPC needs no group")

    def load_bucket(self, bucket: OfferedBucket) -> None:
        assert isinstance(bucket, IpcBucket)
        self.num_buckets += 1
        self.handed_out |= bucket.handles.keys()
        for number, gpu in enumerate(self._gpus):
            received = bucket.read(gpu, torch.device("cpu"))
            self.held[gpu] |= dict(unpack(received, verify=False))
            if number == 0:
                self._specs += received.specs

    def finish_push(self, manifest: Manifest) -> Manifest:
        self.version = manifest.version
        return Manifest.of(manifest.version, self._specs)


class Refuses(Engine):
    def load_bucket(self, bucket: OfferedBucket) -> None:
        raise WeightError("not of this model")


def push(engine: Engine, tensors: Callable[[int], Any]) -> list[Exception | None]:
    """What became of each learner worker."""
    together, handle = Together(), client(engine)

    def work(rank: int) -> Exception | None:
        workers = InThread(rank, together.count, together=together)
        transport = IpcTransport(torch.device("cuda", rank), bucket_bytes=100)
        try:
            transport.push(lambda: tensors(rank), handle, version=3, workers=workers)
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(together.count) as threads:
        return list(threads.map(work, range(together.count)))


def test_each_worker_of_an_engine_reads_the_bucket_on_its_own_gpu():
    """The learner workers fill one bucket's memory again and again, never before it was read."""
    engine = Engine()
    mine = [{name: weight + 100 * rank for name, weight in WEIGHTS.items()} for rank in range(2)]
    assert push(engine, lambda rank: iter(mine[rank].items())) == [None, None]
    assert engine.version == 3
    assert engine.num_buckets > 2
    for rank, gpu in enumerate(GPUS):
        assert engine.held[gpu].keys() == WEIGHTS.keys()
        assert all(torch.equal(engine.held[gpu][name], mine[rank][name]) for name in WEIGHTS)


def test_an_engine_that_refuses_ends_the_push_on_every_worker():
    engine = Refuses()
    errors = push(engine, lambda rank: iter(WEIGHTS.items()))
    assert all(isinstance(error, WeightError) for error in errors)
    assert "learner worker 0 could not push the weights" in str(errors[1])
    assert engine.version is None


def test_a_worker_that_fails_while_it_stages_ends_the_push_on_every_worker():
    def tensors(rank: int) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(WEIGHTS.items()):
            if rank == 1 and number == 4:
                raise OSError("no memory")
            yield item

    engine = Engine()
    first, second = push(engine, tensors)
    assert isinstance(second, OSError)
    assert "learner worker 1 could not push the weights: OSError: no memory" in str(first)
    assert engine.version is None


def test_a_gpu_without_an_engine_hands_out_no_handle():
    engine = Engine(GPUS[1:])
    assert push(engine, lambda rank: iter(WEIGHTS.items())) == [None, None]
    assert engine.version == 3
    assert engine.handed_out == {"GPU-1"}
    assert engine.held["GPU-1"].keys() == WEIGHTS.keys()


def test_engines_that_share_a_gpu_read_the_same_bucket():
    engine = Engine((GPUS[0], GPUS[0]))
    assert push(engine, lambda rank: iter(WEIGHTS.items())) == [None, None]
    assert engine.handed_out == {"GPU-0"}


def test_an_engine_on_a_gpu_without_a_learner_worker_is_told_what_to_set():
    engine = Engine((*GPUS, "GPU-7"))
    for error in push(engine, lambda rank: iter(WEIGHTS.items())):
        assert isinstance(error, WeightError)
        assert "GPU-7, but no learner worker does (they use GPU-0, GPU-1)" in str(error)
        assert "rollout.engine.transport to object or nccl" in str(error)
    assert engine.num_buckets == 0
