"""Roads that weights take from the learner to the engines.

A push is the same conversation on every road: rank 0 asks all engines to `begin_push`, offers
bucket after bucket to `load_bucket`, and ends with `finish_push`, which compares the manifest. An
engine serves again only after the last of the three, so a push that dies anywhere on the way
leaves engines that refuse to sample.
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
from raypo.deployed import AnswerOfOne, MethodOfAll
from raypo.plan.sizes import BUCKET_BYTES
from raypo.weights.buckets import Bucket, Specs, as_bytes, grouped, specs_of
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksums, summary
from raypo.weights.messages import OfferedBucket, Rendezvous, StoredBucket
from raypo.weights.store import Keeper, Kept

REASON_S, POLL_S = 3.0, 0.05
"""How long an engine's end may take to be known, after others have noticed it."""

NamedTensors = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class PushStart:
    """What engines are told before the first bucket."""

    version: int
    id: str = ""
    """Identity of this push (`Kept.id`)."""
    in_flight: InFlight | None = None
    """What becomes of requests that are being sampled: engines pause, until they are told to
    resume, and what is asked meanwhile waits; None: it is refused."""


@dataclass(frozen=True)
class Ready:
    """An engine's answer to `begin_push`."""

    num_workers: int
    """vLLM workers; more than one where it is tensor parallel."""
    epoch: int | None
    """Number of the broadcast group that they are members of."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that they run on."""

    @classmethod
    def together(cls, workers: Sequence[Ready]) -> Ready:
        """An engine's answer, from those of its vLLM workers."""
        epochs = {worker.epoch for worker in workers}
        return cls(
            len(workers),
            epochs.pop() if len(epochs) == 1 else None,
            tuple(gpu for worker in workers for gpu in worker.gpus),
        )


@dataclass(frozen=True)
class WeightPush:
    """A whole weight version that can be loaded again: plain data that fits into a call."""

    version: int
    manifest: Manifest
    buckets: tuple[StoredBucket | Bucket, ...]
    id: str = ""
    """Identity of the push that brought it."""

    def __repr__(self) -> str:
        return f"WeightPush(v{self.version}, {len(self.manifest.tensors)} tensors)"


class Receivers(Protocol):
    """The engines of one push, which are asked one thing after the other."""

    @property
    def begin_push(self) -> MethodOfAll[[PushStart], Ready]:
        """Let go of the weights."""
        ...

    @property
    def join_group(self) -> MethodOfAll[[Rendezvous], None]:
        """Become a member of a broadcast group."""
        ...

    @property
    def load_bucket(self) -> MethodOfAll[[OfferedBucket], None]:
        """Take over the tensors of a bucket."""
        ...

    @property
    def finish_push(self) -> MethodOfAll[[Manifest], Manifest]:
        """Say what has arrived."""
        ...

    @property
    def hold(self) -> MethodOfAll[..., None]:
        """Load what was pushed and is not held yet."""
        ...


class PushedEngines(Protocol):
    """What a push asks of a deployment of engines."""

    def pinned(self) -> Receivers:
        """The engines that are up now."""
        ...

    def require(self, method: str | None, *args: object) -> None:
        """Have every engine make a call before each request; None: no call."""
        ...


class Transport(Protocol):
    """Brings a weight version to all engines."""

    kept: Kept | None
    """On rank 0, the last push that came to its end."""

    def push(
        self, named_tensors: NamedTensors, engines: PushedEngines, *, version: int, workers: Workers
    ) -> None:
        """Hand every tensor to every engine; all workers call it together, with equal tensors.

        Args:
            named_tensors: Whole ones, on any device; each keeps its values as long as it is held.
            engines: All of a run.

        Raises:
            WeightError: on every worker, when a tensor did not arrive as it was sent.
        """
        ...


class ObjectTransport:
    """Through the Ray object store: one put a bucket, read without a copy on the same node.

    The sender keeps the buckets of its last push until it starts the next one, so that an engine
    that was lost can load them again.
    """

    def __init__(
        self, *, in_flight: InFlight | None = None, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.kept: Kept | None = None
        self.keeper = Keeper()
        self.in_flight: InFlight | None = in_flight
        self._bucket_bytes = bucket_bytes

    def push(
        self, named_tensors: NamedTensors, engines: PushedEngines, *, version: int, workers: Workers
    ) -> None:
        """As `Transport.push`; engines load a bucket while the next one is put."""
        with all_or_none(workers), drained(named_tensors) as tensors:
            if workers.rank == 0:
                self.kept = None
                self.keeper.forget()  # frees the old version before the new one takes room
                self.kept = self._send(tensors, engines, version)

    def _send(self, tensors: NamedTensors, engines: PushedEngines, version: int) -> Kept:
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
        return self.keeper.keep(push, id=push.id)


@dataclass
class Conversation:
    """Rank 0's side of a push: it asks all engines and hears all answers."""

    engines: PushedEngines
    version: int
    in_flight: InFlight | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Identity of the push."""
    answers: Sequence[AnswerOfOne[object]] = ()
    """To the last question, on their way."""
    _specs: list[TensorSpec] = field(default_factory=list)
    _up: Receivers | None = None
    """Those that were up when the push began."""

    def begin(self) -> list[Ready]:
        """Every engine lets go of its version and says what it is."""
        self._up = self.engines.pinned()
        start = PushStart(self.version, self.id, self.in_flight)
        return [answer.result() for answer in self._members.begin_push.on_all(start)]

    def offer(self, bucket: OfferedBucket, specs: Specs) -> None:
        """Hand a bucket to all engines; `settle` waits until they have loaded it."""
        self._specs += specs
        self.answers = self._members.load_bucket.on_all(bucket)

    def settle(self) -> None:
        """Wait for the answers to the last question.

        Raises:
            Exception: what an engine raised.
        """
        for answer in self.answers:
            answer.result()
        self.answers = ()

    def failures(self) -> list[Exception]:
        """Errors that engines have answered the last question with; does not wait."""
        return [error for each in self.answers if (error := each.failure()) is not None]

    @contextmanager
    def engines_reasons_first(self) -> Iterator[None]:
        """What ended an engine is raised, rather than what the others noticed of it."""
        try:
            yield
        except WeightError:
            deadline = time.monotonic() + REASON_S
            while True:
                failures = self.failures()
                for error in failures:
                    if not isinstance(error, WeightError):
                        raise error from None
                if len(failures) == len(self.answers) or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def finish(self) -> Manifest:
        """Compare what was sent with what arrived.

        Raises:
            WeightError: an engine received something else.
        """
        manifest = Manifest.of(self.version, self._specs)
        for answer in self._members.finish_push.on_all(manifest):
            differences = manifest.differences(answer.result())
            if differences:
                raise WeightError(f"Push of version {self.version}: {summary(differences)}.")
        return manifest

    def join_group(self, rendezvous: Rendezvous) -> None:
        """Have all engines join a broadcast group; `settle` waits until they have."""
        self.answers = self._members.join_group.on_all(rendezvous)

    @property
    def _members(self) -> Receivers:
        assert self._up is not None, "a conversation begins with `begin`"
        return self._up


@contextmanager
def drained(named_tensors: NamedTensors) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Iterate to the end whatever happens: the other workers gather the same tensors."""
    tensors = iter(named_tensors)
    try:
        yield tensors
    finally:
        for _ in tensors:
            pass


@contextmanager
def all_or_none(workers: Workers) -> Iterator[None]:
    """Where one worker fails, all of them do, and none waits for another.

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
