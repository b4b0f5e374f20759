"""The watchdog of a run: it finds a hang from the workers' heartbeats, and ends what hangs.

A run hangs if, for the config's `hang_limit_s`, a worker's process has not answered, or a piece of
work that must move by itself has not moved (`raypo.pending_work`), or nothing in any worker has.
The watchdog then reads the stacks of all processes, kills the learner workers, and writes the
stacks to `hangs/` in the run's folder. Ray Train restarts the workers from the last checkpoint as
often as `max_failures` allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

from ray.train import ControllerError, WorkerGroupError

from raypo.cluster.heartbeat import Beat
from raypo.cluster.stacks import kill_processes, stacks_of
from raypo.concurrency import daemon_future
from raypo.pending_work import REPORT, Pending
from raypo.ray_internals import ActorProcess, actors_of_this_job, is_driver
from raypo.storage.run_files import HANGS, RunFiles

LOOK_EVERY_S = 0.5
LONGEST_SILENCE_S = 540.0
"""Seconds without a beat after which a worker hangs in any case. Ray Train (2.60) ends a worker
that does not answer for 600 s, without a word about what it did."""
KILLED_WITHIN_S = 180.0
"""Seconds after which a worker that still sends beats was not killed: its node did not answer."""
WRITTEN_WITHIN_S = 30.0
"""Seconds that writing the stacks may take, on a storage that may not answer."""
CONTROLLER = "TrainController"
"""Class of Ray Train's controller, an actor without a name."""
BUSY = "; on GPUs workers that wait for another look busy too, so compare their stacks"
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


@dataclass(frozen=True)
class Hang:
    """A hang: who waits for whom."""

    idle_s: float
    culprits: Sequence[str]
    """One phrase for each process that is stuck."""
    waiting: Sequence[str] = ()
    """A clause for each worker that waits for them."""
    replicas: frozenset[str] = frozenset()
    """Names of the replicas among the culprits."""
    is_of_controller: bool = False
    """True if all workers wait for Ray Train's controller to take their report."""
    note: str = ""
    """Advice that follows the clauses."""

    def __str__(self) -> str:
        return "; ".join([*self.culprits, *self.waiting[:MOST_WAITING]]) + self.note


def find_hang(workers: Sequence[Worker], timeout_s: float) -> Hang | None:
    """Return the hang of a run, or None if it goes on.

    If no thread stands still in work of its own, replicas are blamed, then work that must move.
    Idle times are those that the workers have sent: a late beat does not make them longer.
    """
    silence_s = min(timeout_s, LONGEST_SILENCE_S)
    silent = [worker for worker in workers if worker.age_s >= silence_s]
    idle_s = max([_idle_s(workers), *(worker.age_s for worker in silent)])
    if idle_s < timeout_s and not silent:
        return None
    stands = [
        (worker, work)
        for worker in workers
        for work in worker.beat.pending
        if worker not in silent and work.idle_s >= timeout_s
    ]
    blamed: Sequence[tuple[Worker, Pending]] = []
    if not silent:
        candidates = (
            [pair for pair in stands if pair[1].place and not pair[1].waits],
            [pair for pair in stands if pair[1].replica],
            [pair for pair in stands if pair[1].must_move],
            stands,
        )
        blamed = next((pairs for pairs in candidates if pairs), [])
    return Hang(
        idle_s,
        [_silence(worker) for worker in silent] + [_clause(*pair) for pair in blamed],
        [_clause(*pair) for pair in stands if pair not in blamed],
        frozenset(work.replica for _, work in blamed if work.replica),
        is_of_controller=bool(blamed) and all(work.name == REPORT for _, work in stands),
        note=BUSY if _are_all_busy(workers, blamed) else "",
    )


def _are_all_busy(workers: Sequence[Worker], blamed: Sequence[tuple[Worker, Pending]]) -> bool:
    """Return True if all of several workers seem to work, and on the same."""
    works = {(worker.beat.rank, work.name) for worker, work in blamed if not work.waits}
    return len(workers) > 1 and any(
        {(worker.beat.rank, name) for worker in workers} <= works for name in {n for _, n in works}
    )


def _idle_s(workers: Sequence[Worker]) -> float:
    """Return how long the run has been stuck, in seconds.

    This is the longest idle time of work that must move, or the time since any worker has moved,
    whichever is longer. Work that several workers do together, such as an update, counts as moving
    if it moves on any of them, because the others may wait for the slowest. It also moves if work
    inside it does.
    """
    all_work = [work for worker in workers for work in worker.beat.pending]
    least: dict[str, float] = {}
    for work in all_work:
        for name in (*work.inside, work.name):
            least[name] = min(least.get(name, math.inf), work.idle_s)
    idle_s = [least[work.name] for work in all_work if work.must_move]
    if all_work:  # outside of all work, the start of engines has its own limit
        idle_s.append(min(worker.beat.idle_s for worker in workers))
    return max(idle_s, default=0.0)


def _clause(worker: Worker, work: Pending) -> str:
    if work.replica:
        place = f" in {' > '.join(work.inside)}" if work.inside else ""
        return f"{worker.name} waits{place} for {work.name}"
    verb = "waits" if work.waits else "does not go on"
    return f"{worker.name} {verb} in {_chain(work)}" + (f", in {work.place}" if work.place else "")


def _silence(worker: Worker) -> str:
    was_in = ", ".join(map(_chain, worker.beat.pending))
    return (
        f"{worker.name} does not answer: its process is stopped or blocked"
        f"{was_in and f' (it was in {was_in})'}"
    )


def _chain(work: Pending) -> str:
    return " > ".join([*work.inside, work.name])


@dataclass
class Watchdog:
    """The watchdog of one run, in its driver. The main thread calls every method."""

    timeout_s: float | None
    """`hang_limit_s` of the config. None means that nothing is watched."""
    max_failures: int
    files: RunFiles
    say: Callable[[str], None]
    """Callback that prints a line on the console."""
    hang: str | None = None
    """Message about the hang that ended the present attempt."""
    _beats: dict[int, tuple[Beat, float]] = field(default_factory=dict)
    """Last beat of each worker by rank, and the time when it arrived."""
    _ended: dict[str, float] = field(default_factory=dict)
    """Time when each actor was killed, by its id."""
    _looked_at: float = 0.0
    _quiet_until: float = 0.0
    """Time before which nothing counts as a hang."""

    def begin_attempt(self, _: None = None) -> None:
        """Note that the workers of an attempt have started: no earlier hang explains its end."""
        self.hang = None

    def explained(
        self, error: WorkerGroupError | ControllerError
    ) -> WorkerGroupError | ControllerError:
        """Return the error of a run that has failed, or that of the hang that ended it."""
        has_reason = isinstance(error, WorkerGroupError) and not error.worker_failures
        if self.hang is None or has_reason:
            return error
        return WorkerGroupError(self.hang, getattr(error, "worker_failures", {}))

    def note(self, beat: Beat) -> None:
        """Note a worker's beat."""
        if time.monotonic() - self._ended.get(beat.actor_id, -math.inf) < KILLED_WITHIN_S:
            return
        if beat.is_last:
            self._beats.pop(beat.rank, None)
        else:
            self._beats[beat.rank] = beat, time.monotonic()

    def look(self) -> None:
        """End the workers if the run hangs. Call this often."""
        now = time.monotonic()
        if self.timeout_s is None or now - self._looked_at < LOOK_EVERY_S:
            return
        # This process may have been stopped itself, and the workers with it. Then it has to read
        # the beats first, and their idle times are too long until everything has moved again.
        if now - self._looked_at > min(self.timeout_s, LONGEST_SILENCE_S) / 2:
            self._quiet_until = now + self.timeout_s
        self._looked_at = now
        if now < self._quiet_until or find_hang(self._workers(), self.timeout_s) is None:
            return
        try:
            actors = actors_of_this_job()
        except Exception:  # Ray's head does not answer; the next look asks again
            return
        if not is_driver():  # a trial of a sweep, whose job has the actors of all trials
            ids = {beat.actor_id for beat, _ in self._beats.values()}
            own = f"raypo:{self.files.name}:"
            actors = [a for a in actors if a.actor_id in ids or a.name.startswith(own)]
        alive = {actor.actor_id for actor in actors}
        # Drop dead workers: they send no more beats, and Ray Train replaces them.
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
            f"hang: no progress for {hang.idle_s:.0f} s (the limit is "
            f"{self.timeout_s:g} s). {hang}."
        )
        self.say(message)
        named = [
            replace(actor, name=f"learner_worker_{ids[actor.actor_id]}")
            if actor.actor_id in ids
            else actor
            for actor in actors
        ]
        stacks: Mapping[str, str] = {}
        with suppress(Exception):  # the message and the kill are worth more than the stacks
            stacks = stacks_of(named)
        own = {
            f"learner_worker_{beat.rank}_python.txt": beat.stacks
            for beat, _ in self._beats.values()
            if beat.stacks
        }
        others = hang.replicas | ({CONTROLLER} if hang.is_of_controller else set())
        with suppress(Exception):  # workers that still send beats are killed after a later look
            kill_processes(a for a in actors if a.actor_id in ids or a.name in others)
        self._ended |= dict.fromkeys(ids, time.monotonic())
        self._beats.clear()
        where = self._written({"what.txt": message + "\n", **stacks, **own})
        remedy = (
            f"The stacks of {len(stacks)} processes are {where}. If the run was only slow, raise "
            "placement.hang_timeout_s."
        )
        self.hang = f"{message} {remedy} The same command resumes from the last checkpoint."
        self.say(
            f"{remedy} The learner workers are killed; max_failures ({self.max_failures}) is the "
            "number of times that a run resumes by itself."
        )
        self._looked_at = time.monotonic()  # this took a while, in which nothing was stopped

    def _written(self, texts: Mapping[str, str]) -> str:
        """Write files about a hang, and return where they are."""
        name = f"{HANGS}/{datetime.now():%Y-%m-%dT%H-%M-%S}"
        folder = self.files.folder / name

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in texts.items():
                (folder / file).write_text(text, encoding="utf-8")

        try:  # in a thread: the dead storage may be what hangs
            daemon_future(write, name="raypo-stacks").result(WRITTEN_WITHIN_S)
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer for {WRITTEN_WITHIN_S:g} s"
            return f"not written to {folder} ({reason})"
        return f"in {self.files.location}/{name}"
