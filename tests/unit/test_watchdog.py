"""Judgement of hangs by the workers' heartbeats: the process that hangs, and those that wait."""

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray.train import ControllerError, WorkerGroupError

from raypo.cluster.heartbeat import Beat
from raypo.cluster.run_monitor import Monitor
from raypo.pending_work import REPORT, Pending
from raypo.ray_internals import ActorProcess
from raypo.storage.run_files import RunFiles
from raypo.trainer import watchdog
from raypo.trainer.watchdog import Hang, Watchdog, Worker, find_hang

LIMIT_S = 30.0
STEP = Pending("step 2", (), 1.0, False, None, "wait (threading.py:1)", True)
UPDATE = Pending("the update", ("step 2",), 1.0, True, None, "step (engine.py:1)", False)
COLLECTIVE = replace(UPDATE, place="the collective all_reduce (c10d.py:1)", waits=True)
CALL = Pending("engine 0 (submit)", ("step 2", "sampling"), 1.0, True, "run:engine:0", "", False)
REWARD = Pending(
    "the reward function score (8 responses)", ("step 2",), 1.0, True, None, "wait (...)", True
)
BROADCAST = replace(STEP, place="the collective broadcast (c10d.py:1), called by Rollouts.take")


def worker(rank: int, *pending: Pending, idle_s: float | None = None, age_s: float = 1.0) -> Worker:
    least = min((work.idle_s for work in pending), default=0.0)
    return Worker(Beat(rank, str(rank), idle_s if idle_s is not None else least, pending), age_s)


def idle(work: Pending, seconds: float = 40.0) -> Pending:
    return replace(work, idle_s=seconds)


def found(*workers: Worker) -> Hang:
    hang = find_hang(workers, LIMIT_S)
    assert hang is not None
    return hang


def test_the_monitor_keeps_the_last_beat_of_each_worker():
    monitor = Monitor()
    first, second, other = Beat(0, "a"), Beat(0, "a", idle_s=2.0), Beat(1, "b")
    for beat in (first, second, other):
        monitor.beat(beat)
    assert monitor.drain({}) == [("beat", second), ("beat", other)]
    assert monitor.drain({}) == []


def test_a_run_of_which_anything_moves_does_not_hang():
    assert find_hang([], LIMIT_S) is None
    assert find_hang([worker(0, CALL), worker(1, idle(BROADCAST))], LIMIT_S) is None
    # The others wait for the slowest worker of an update.
    assert find_hang([worker(0, idle(COLLECTIVE)), worker(1, UPDATE)], LIMIT_S) is None
    in_update = replace(CALL, inside=("step 2", "the update"))
    assert find_hang([worker(0, idle(COLLECTIVE)), worker(1, in_update)], LIMIT_S) is None
    assert find_hang([worker(0, idle(STEP, 29.0), age_s=0.5)], LIMIT_S) is None


def test_an_engine_that_does_not_move_is_named_and_ended_also_while_a_worker_trains():
    hang = found(worker(0, UPDATE, idle(CALL), idle_s=0.0), worker(1, UPDATE))
    assert str(hang) == "learner worker 0 waits in step 2 > sampling for engine 0 (submit)"
    assert hang.replicas == {"run:engine:0"}
    assert hang.idle_s == 40.0


def test_the_worker_that_works_is_named_before_those_that_wait_for_it():
    hang = found(worker(0, idle(COLLECTIVE)), worker(1, idle(UPDATE)))
    assert str(hang) == (
        "learner worker 1 does not go on in step 2 > the update, in step (engine.py:1); "
        "learner worker 0 waits in step 2 > the update, in the collective all_reduce (c10d.py:1)"
    )
    assert not hang.replicas


def test_a_reward_function_in_a_thread_of_its_own_is_named():
    hang = found(worker(0, idle(REWARD)), worker(1, idle(BROADCAST)))
    assert hang.culprits == [
        "learner worker 0 waits in step 2 > the reward function score (8 responses), in wait (...)"
    ]
    assert hang.waiting == [
        "learner worker 1 waits in step 2, in the collective broadcast (c10d.py:1), called by "
        "Rollouts.take"
    ]


def test_workers_that_all_wait_are_all_named():
    hang = found(worker(0, idle(COLLECTIVE)), worker(1, idle(BROADCAST)))
    assert len(hang.culprits) == 1
    assert "learner worker 0 waits in step 2 > the update" in str(hang)
    assert "learner worker 1 waits in step 2, in the collective broadcast" in str(hang)
    both = found(worker(0, idle(BROADCAST)), worker(1, idle(STEP)))
    assert len(both.culprits) == 2


def test_a_process_that_does_not_answer_is_named_with_its_last_work():
    hang = found(worker(0, idle(COLLECTIVE)), worker(1, UPDATE, age_s=31.0))
    assert hang.culprits == [
        "learner worker 1 does not answer: its process is stopped or blocked (it was in step 2 > "
        "the update)"
    ]
    assert len(hang.waiting) == 1
    silent = found(worker(0, CALL, UPDATE), worker(1, STEP, age_s=31.0))
    assert str(silent).startswith("learner worker 1 does not answer")
    # Before Ray Train ends it.
    assert find_hang([worker(0, CALL), worker(1, STEP, age_s=541.0)], 1800.0) is not None
    assert find_hang([worker(0, CALL), worker(1, STEP, age_s=500.0)], 1800.0) is None


def test_all_workers_have_to_be_idle_if_no_work_must_move_and_one_has_to_be_in_a_step():
    assert found(worker(0, idle(STEP), idle_s=40.0), worker(1, idle_s=35.0)).idle_s == 35.0
    assert find_hang([worker(0, idle(STEP), idle_s=40.0), worker(1, idle_s=3.0)], LIMIT_S) is None
    assert find_hang([worker(0, idle_s=40.0), worker(1, idle_s=35.0)], LIMIT_S) is None


def test_a_report_that_nobody_takes_is_the_controllers_hang():
    report = idle(replace(STEP, name=REPORT))
    assert found(worker(0, report), worker(1, report)).is_of_controller
    assert not found(worker(0, report), worker(1, idle(STEP))).is_of_controller


def test_a_late_beat_makes_no_work_idle():
    # It may have ended since, for example because its own limit was reached.
    assert find_hang([worker(0, idle(REWARD, 29.0), age_s=5.0)], LIMIT_S) is None


def test_workers_that_are_all_busy_in_the_same_work_are_to_be_compared():
    # With NCCL only the device of a worker waits.
    hang = found(worker(0, idle(UPDATE)), worker(1, idle(UPDATE)))
    assert str(hang).endswith(
        "; on GPUs workers that wait for another look busy too, so compare their stacks"
    )
    for others in ([], [worker(1, idle(COLLECTIVE))]):
        assert "compare" not in str(found(worker(0, idle(UPDATE)), *others))


def test_a_replica_without_work_around_it_is_named():
    hang = found(worker(0, idle(replace(CALL, inside=()))))
    assert str(hang) == "learner worker 0 waits for engine 0 (submit)"


class Driver:
    """A watchdog with beats and processes that a test gives it, at a time that it sets."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said, self.killed = 1000.0, list[str](), list[str]()
        self.actors = [ActorProcess("a0", "worker", "node", 1)]
        self.watchdog = Watchdog(LIMIT_S, 1, RunFiles(str(tmp_path), "run"), self.said.append)
        monkeypatch.setattr(watchdog.time, "monotonic", lambda: self.now)
        for name in ("actors_of_this_job", "stacks_of", "kill_processes"):
            monkeypatch.setattr(watchdog, name, getattr(self, name))
        monkeypatch.setattr(watchdog, "is_driver", lambda: True)
        self.watchdog.look()
        self.pass_time(LIMIT_S)

    def actors_of_this_job(self) -> list[ActorProcess]:
        return self.actors

    def stacks_of(self, actors: Iterable[ActorProcess]) -> dict[str, str]:
        return {f"{actor.name}.txt": "stack" for actor in actors}

    def kill_processes(self, actors: Iterable[ActorProcess]) -> None:
        self.killed += [actor.actor_id for actor in actors]

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watchdog.look()

    def beat(self, idle_s: float) -> None:
        self.watchdog.note(Beat(0, "a0", idle_s, (idle(UPDATE, idle_s),)))
        self.pass_time(1.0)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(tmp_path, monkeypatch)


def test_a_hang_is_ended_and_its_stacks_are_written(driver: Driver, tmp_path: Path):
    driver.beat(29.0)
    assert not driver.killed
    driver.beat(30.0)
    assert driver.killed == ["a0"]
    (folder,) = (tmp_path / "run" / "hangs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"what.txt", "learner_worker_0.txt"}
    assert f"The stacks of 1 processes are in {folder}. If" in driver.said[-1]


def test_a_hang_is_ended_if_its_stacks_can_be_neither_read_nor_written(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "run").write_text("no folder")
    monkeypatch.setattr(watchdog, "stacks_of", Mock(side_effect=OSError("no process")))
    driver.beat(31.0)
    assert driver.killed == ["a0"]
    assert "are not written to" in driver.said[-1]


def test_a_storage_that_does_not_answer_holds_nobody_up(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    answers = threading.Event()
    monkeypatch.setattr(watchdog, "WRITTEN_WITHIN_S", 0.05)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: answers.wait(10.0))
    driver.beat(31.0)
    answers.set()
    assert driver.killed == ["a0"]
    assert "(no answer for 0.05 s)" in driver.said[-1]


def test_a_look_at_a_cluster_that_does_not_answer_is_repeated(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(watchdog, "actors_of_this_job", Mock(side_effect=RuntimeError("no head")))
    driver.beat(31.0)
    assert not driver.killed
    monkeypatch.setattr(watchdog, "actors_of_this_job", driver.actors_of_this_job)
    driver.pass_time(1.0)
    assert driver.killed == ["a0"]


def test_a_job_that_was_stopped_and_goes_on_does_not_hang(driver: Driver):
    driver.beat(0.0)
    driver.now += 1000.0  # all processes were stopped
    driver.watchdog.look()
    driver.beat(1000.0)
    driver.pass_time(10.0)
    assert not driver.killed
    for _ in range(30):
        driver.beat(1000.0)  # it was not the only reason
    assert driver.killed == ["a0"]


def test_a_worker_that_outlives_its_kill_is_killed_again(driver: Driver):
    driver.beat(31.0)
    driver.beat(32.0)
    assert driver.killed == ["a0"]
    assert driver.watchdog.hang is not None
    driver.pass_time(180.0)
    driver.beat(212.0)
    assert driver.killed == ["a0", "a0"]


def test_a_hang_explains_the_end_of_its_own_attempt_only(driver: Driver):
    lost, other = WorkerGroupError("lost", {0: ValueError()}), WorkerGroupError("no engine", {})
    assert driver.watchdog.explained(lost) is lost
    driver.beat(31.0)
    assert "hang: no progress" in str(driver.watchdog.explained(lost))
    assert "hang: no progress" in str(driver.watchdog.explained(ControllerError(ValueError())))
    assert driver.watchdog.explained(other) is other  # a dedicated role is lost
    monitor = Monitor()
    monitor.begin_attempt(None)
    ((kind, content),) = monitor.drain({})
    assert kind == "attempt"
    driver.watchdog.begin_attempt(content)
    assert driver.watchdog.explained(lost) is lost
