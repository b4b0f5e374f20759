"""The watchdog of a run: it finds a hang from the workers' heartbeats, and ends what hangs.

A run hangs if, for `placement.hang_timeout_s`, a worker's process has not answered, or a piece of
work that must move by itself has not moved (`raypo.progress`), or nothing in any worker has. The
watchdog then writes the stacks of all processes to `hangs/` in the run's folder, and kills the
learner workers. Ray Train restarts them from the last checkpoint as often as `max_failures` allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby

from ray.exceptions import RayError

from raypo.cluster.heartbeat import Beat
from raypo.cluster.stacks import kill_processes, stacks_of
from raypo.progress import Pending
from raypo.ray_internals import ActorProcess, actors_of_this_job
from raypo.storage.run_files import HANGS, RunFiles

LOOK_EVERY_S = 0.5
MOST_WAITING = 4
"""Number of waiting workers that a message names."""


@dataclass(frozen=True)
class Worker:
    """A learner worker's last beat, and its age in seconds."""

    beat: Beat
    age_s: float

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"learner worker {self.beat.rank}"

    @property
    def idle_s(self) -> float:
        """Seconds since anything in the worker has moved."""
        return self.beat.idle_s + self.age_s

    def idle_of(self, work: Pending) -> float:
        """Return the seconds since a piece of the worker's work has moved."""
        return work.idle_s + self.age_s


@dataclass(frozen=True)
class Hang:
    """A hang: who waits for whom."""

    idle_s: float
    culprits: Sequence[str]
    """A clause for each process that does not go on."""
    waiting: Sequence[str] = ()
    """A clause for each worker that waits for them."""
    replicas: frozenset[str] = frozenset()
    """Names of the replicas among the culprits."""

    def __str__(self) -> str:
        return ". ".join(["; ".join(self.culprits), *self.waiting[:MOST_WAITING]])


def find_hang(workers: Sequence[Worker], timeout_s: float) -> Hang | None:
    """Return the hang of a run, or None if it goes on.

    Work of one name that several workers do together, such as an update, moves if it does on any of
    them: the others may wait for the slowest.
    """
    silent = [worker for worker in workers if worker.age_s >= timeout_s]
    all_work = [(worker, work) for worker in workers for work in worker.beat.pending]
    by_name = sorted(all_work, key=lambda pair: pair[1].name)
    least = {
        name: min(worker.idle_of(work) for worker, work in group if work.must_move)
        for name, group in groupby(
            (pair for pair in by_name if pair[1].must_move), key=lambda pair: pair[1].name
        )
    }
    idle_s = max([0.0, *least.values(), *(worker.age_s for worker in silent)])
    if workers:
        idle_s = max(idle_s, min(worker.idle_s for worker in workers))
    if idle_s < timeout_s:
        return None
    if silent:
        culprits = [
            f"{worker.name} does not answer: its process is stopped or blocked{_inside(worker)}"
            for worker in silent
        ]
        others = [pair for pair in all_work if pair[0] not in silent]
        return Hang(idle_s, culprits, list(_waiting(others)))
    stands = [pair for pair in all_work if pair[0].idle_of(pair[1]) >= timeout_s]
    kinds = (
        [pair for pair in stands if not pair[1].waits and pair[1].place],
        [pair for pair in stands if pair[1].replica],
        [pair for pair in stands if pair[1].must_move],
        stands,
    )
    blamed = next((pairs for pairs in kinds if pairs), [])
    return Hang(
        idle_s,
        list(dict.fromkeys(_clause(*pair) for pair in blamed)) or ["no worker says what it does"],
        list(_waiting([pair for pair in stands if pair not in blamed])),
        frozenset(work.replica for _, work in blamed if work.replica),
    )


def _clause(worker: Worker, work: Pending) -> str:
    phase = " > ".join([*work.inside, work.name])
    if work.replica:
        return f"{worker.name} waits in {' > '.join(work.inside)} for {work.name}"
    verb = "waits" if work.waits else "does not go on"
    return f"{worker.name} {verb} in {phase}" + (f", in {work.place}" if work.place else "")


def _waiting(pairs: Sequence[tuple[Worker, Pending]]) -> Iterator[str]:
    for worker, work in pairs:
        yield _clause(worker, work)


def _inside(worker: Worker) -> str:
    names = [" > ".join([*work.inside, work.name]) for work in worker.beat.pending]
    return f" (it was in {', '.join(names)})" if names else ""


@dataclass
class Watchdog:
    """The watchdog of one run, in its driver. The main thread calls every method."""

    timeout_s: float | None
    """`placement.hang_timeout_s`. None means that nothing is watched."""
    max_failures: int
    files: RunFiles
    say: Callable[[str], None]
    """Callback that prints a line on the console."""
    hang: str | None = None
    """Message about the hang that ended the present attempt."""
    _beats: dict[int, tuple[Beat, float]] = field(default_factory=dict)
    """Last beat of each worker by rank, and the time when it arrived."""
    _ended: set[str] = field(default_factory=set)
    """Ids of the actors that were killed."""
    _looked_at: float = 0.0

    def note(self, beat: Beat) -> None:
        """Note a worker's beat."""
        if beat.actor_id in self._ended:
            return
        if beat.is_last:
            self._beats.pop(beat.rank, None)
        else:
            self._beats[beat.rank] = beat, time.monotonic()
            self.hang = None

    def look(self) -> None:
        """End the workers if the run hangs. Call this often."""
        now = time.monotonic()
        if self.timeout_s is None or now - self._looked_at < LOOK_EVERY_S:
            return
        # This process may have been stopped itself, and then has to read the beats first.
        was_away, self._looked_at = now - self._looked_at > self.timeout_s / 2, now
        if was_away or find_hang(self._workers(), self.timeout_s) is None:
            return
        actors = actors_of_this_job()
        alive = {actor.actor_id for actor in actors}
        # A worker that has died sends no beat, and Ray Train replaces it.
        self._beats = {
            rank: seen for rank, seen in self._beats.items() if seen[0].actor_id in alive
        }
        if (hang := find_hang(self._workers(), self.timeout_s)) is not None:
            self._end(hang, actors)

    def _workers(self) -> list[Worker]:
        now = time.monotonic()
        return [Worker(beat, now - at) for _, (beat, at) in sorted(self._beats.items())]

    def _end(self, hang: Hang, actors: Sequence[ActorProcess]) -> None:
        ids = {beat.actor_id: rank for rank, (beat, _) in self._beats.items()}
        message = (
            f"hang: nothing has moved for {hang.idle_s:.0f} s (placement.hang_timeout_s: "
            f"{self.timeout_s:g}). {hang}."
        )
        self.say(message)
        named = [
            replace(actor, name=f"learner_worker_{ids[actor.actor_id]}")
            if actor.actor_id in ids
            else actor
            for actor in actors
        ]
        stacks: Mapping[str, str] = {}
        with suppress(RayError):  # the message is worth more than the stacks
            stacks = stacks_of(named)
        remedy = (
            f"The stacks of {len(stacks)} processes are in {self._write(message, stacks)}. If the "
            "run was only slow, raise placement.hang_timeout_s."
        )
        self.hang = f"{message} {remedy} The same command resumes from the last checkpoint."
        self.say(
            f"{remedy} The learner workers are killed; max_failures ({self.max_failures}) is the "
            "number of times that a run resumes by itself."
        )
        self._ended |= ids.keys()
        self._beats.clear()
        with suppress(RayError):
            kill_processes(
                actor for actor in actors if actor.actor_id in ids or actor.name in hang.replicas
            )

    def _write(self, message: str, stacks: Mapping[str, str]) -> str:
        name = f"{HANGS}/{datetime.now():%Y-%m-%dT%H-%M-%S}"
        own = {
            f"learner_worker_{beat.rank}_python.txt": beat.stacks
            for beat, _ in self._beats.values()
            if beat.stacks
        }
        for file, text in {"what.txt": message + "\n", **stacks, **own}.items():
            path = self.files.folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return f"{self.files.location}/{name}"
