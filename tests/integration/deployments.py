"""Classes to deploy, that tests can look into from outside."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from raypo.cluster.actors import ReplicaLost
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.spec import Status
from raypo.serving.requests import Completion, SamplingRequest
from raypo.weights.buckets import unpack
from raypo.weights.group import Group
from raypo.weights.manifest import Manifest, TensorSpec, WeightError
from raypo.weights.messages import PushStart, Ready, Rendezvous, StoredBucket, WeightPush
from raypo.weights.store import WeightSnapshot


class Doubler:
    """Doubles, and writes each request that it has done to a file: `<number> <pid>`."""

    def __init__(self, folder: str, delays: tuple[float, ...] = (0.0,)) -> None:
        self._folder = Path(folder)
        number = len(list(self._folder.glob("started_*")))
        (self._folder / f"started_{os.getpid()}").touch()
        self._delay_s = delays[number % len(delays)]
        self._version: int | None = None
        self._is_broken = False
        self._stuck_since: float | None = None

    def __repr__(self) -> str:
        return f"Doubler(v{self._version}, ready)"

    def check_health(self) -> None:
        if self._is_broken:
            raise RuntimeError("the doubler is broken")

    def double(self, number: int) -> int:
        time.sleep(self._delay_s)
        with (self._folder / "done").open("a") as file:
            file.write(f"{number} {os.getpid()}\n")
        return 2 * number

    def pid(self) -> int:
        return os.getpid()

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def load(self, version: int) -> int:
        self._version = version
        return version

    def hold(self, version: int) -> None:
        """As an engine: where it is told for the first time, or after it was started again."""
        if self._version != version:
            self.load(version)

    def refuse(self) -> None:
        raise RuntimeError("nothing is kept")

    def version(self) -> int | None:
        return self._version

    def get_stuck_once(self, path: str) -> str:
        """It goes on to answer health checks."""
        if Path(path).exists():
            Path(path).unlink()
            self._stuck_since = time.monotonic()
            threading.Event().wait()
        return "done"

    def stalled_s(self) -> float:
        since = self._stuck_since
        return 0.0 if since is None else time.monotonic() - since

    def break_down(self) -> None:
        self._is_broken = True
        raise IndexError("out of range")

    def fail(self) -> None:
        raise ValueError("a bad request")

    def wait_for(self, path: str) -> str:
        while not Path(path).exists():
            time.sleep(0.02)
        return "seen"


class Receiver:
    """What an engine does with a push, without vLLM; it dies at a bucket if a file says so."""

    def __init__(self, dies: str) -> None:
        self._dies = Path(dies)
        self._group: Group | None = None
        self._version: int | None = None
        self._held: str | None = None
        self._id: str | None = None
        self._adapter: int | None = None
        self._arrived: dict[str, torch.Tensor] = {}
        self._specs: list[TensorSpec] = []

    def begin_push(self, start: PushStart) -> Ready:
        self._version, self._arrived, self._specs = None, {}, []
        self._id, self._held = start.id, None
        return Ready(1, self._group.rendezvous.epoch if self._group else None)

    def join_group(self, rendezvous: Rendezvous) -> None:
        self._group = Group.join(rendezvous, device="cpu")

    def load_bucket(self, bucket: Any) -> None:
        if self._id is None:
            raise ReplicaLost("no push has begun")
        if self._dies.exists():
            self._dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(bucket, StoredBucket):
            received = bucket.fetch()
        else:
            assert self._group is not None
            received = self._group.receive(bucket)
        self._arrived |= {name: t.clone() for name, t in unpack(received, verify=True)}
        self._specs += received.specs

    def finish_push(self, manifest: Manifest) -> Manifest:
        if self._id is None:
            raise ReplicaLost("no push has begun")
        self._version, self._held, self._id = manifest.version, self._id, None
        return Manifest.of(manifest.version, self._specs)

    def hold(self, *pushes: WeightSnapshot, in_flight: Any = None) -> None:
        for kept in pushes:
            if kept.adapter is not None:
                self._adapter = kept.fetch().version
                continue
            if self._held == kept.id:
                continue
            push: WeightPush | None = kept.fetch()
            if push is None:
                raise WeightError("nothing is kept")
            self.begin_push(PushStart(push.version, push.id))
            for bucket in push.buckets:
                self.load_bucket(bucket)
            self.finish_push(push.manifest)

    def submit(self, requests: list[SamplingRequest], *, alone: bool = False) -> list[Completion]:
        """One token each, which is the version; it dies on the way if a file says so.

        What joins waits for as long as a file holds it up.
        """
        while not alone and self._dies.with_name("holds_up").exists():
            time.sleep(0.02)
        if self._dies.exists():
            self._dies.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._version is None:
            raise RuntimeError("no weights")
        answer = Completion(
            np.array([self._version], dtype=np.int32),
            np.zeros(1, dtype=np.float32),
            "length",
            self._version,
        )
        return [answer] * len(requests)

    def adapter(self) -> int | None:
        """The version of the adapter."""
        return self._adapter

    def held(self) -> tuple[int | None, float]:
        """The version, and the sum over all weights."""
        return self._version, float(sum(t.sum() for t in self._arrived.values()))


class Stillborn:
    def __init__(self) -> None:
        raise ValueError("no such model")


def pids(handle: DeploymentHandle) -> list[int]:
    return [replica.control(Doubler.pid).result() for replica in handle.up()]


def statuses(handle: DeploymentHandle) -> list[Status]:
    """The replies of the replicas that are up to a health check."""
    replicas = [ray.get_actor(replica.name, replica.namespace) for replica in handle.up()]
    return ray.get([replica.status.remote() for replica in replicas])


def done(folder: Path) -> list[tuple[int, int]]:
    """(number, pid) of every request that a replica has done."""
    file = folder / "done"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(number), int(pid)) for number, pid in map(str.split, lines)]


class Sleeper:
    """Writes into a file when it is made and when it goes to sleep, as what takes turns does."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = Path(path), name
        self._note("made")

    def sleep(self) -> None:
        self._note("asleep")

    def _note(self, what: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{self._name} {what}\n")
