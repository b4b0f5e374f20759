"""Whether a run that has lost Ray Train's controller goes on by itself."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
    RayTaskError,
)
from ray.train import UserCallback, WorkerGroupError
from ray.train.torch import TorchTrainer

from raypo.cluster.actors import DeploymentError
from raypo.cluster.run_monitor import Monitor
from raypo.run.setup import RUNTIME_KEY
from raypo.trainer.trainer import RecipeTrainer, _loop
from raypo.trainer.watch import PrintingCallback, advice, failures_left, is_lost_controller


@pytest.mark.parametrize(
    ("max_failures", "failures", "left"),
    [
        (0, 1, None),  # none is allowed
        (1, 1, 0),  # the one that is allowed
        (1, 2, None),
        (3, 2, 1),  # a lost worker, then the controller
        (-1, 1, -1),
        (-1, 1000, -1),
    ],
)
def test_a_lost_controller_counts_with_the_lost_workers(
    max_failures: int, failures: int, left: int | None
):
    assert failures_left(max_failures, failures) == left


def test_an_attempt_without_a_dedicated_role_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    """Another attempt would fail in the same way, with `max_failures: -1` for ever."""
    error = DeploymentError("engine: no replica is left")
    handle = SimpleNamespace(is_lost=lambda: True, lost_error=lambda: error)
    ended = _loop("ppo")({RUNTIME_KEY: SimpleNamespace(dedicated={"engine": handle})})
    assert ended == {"status": "failed", "reason": str(error)}
    result = SimpleNamespace(return_value=ended)
    monkeypatch.setattr(TorchTrainer, "fit", lambda self: result)
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(max_failures=-1), _allow_failures=lambda count: None
    )
    with pytest.raises(WorkerGroupError, match="engine: no replica is left"):
        RecipeTrainer._fit_under_controllers(trainer, None)  # type: ignore[arg-type]


def test_only_a_controller_whose_process_ended_has_a_successor():
    died = ActorDiedError()
    assert is_lost_controller(died)
    assert is_lost_controller(OutOfMemoryError("killed by Ray's memory monitor"))
    assert is_lost_controller(ActorUnschedulableError("its node is gone"))
    of_a_task = RayTaskError("run", "traceback", died).as_instanceof_cause()
    assert isinstance(of_a_task, ActorDiedError)
    assert not is_lost_controller(of_a_task)  # its own code met another dead actor
    in_its_start = ActorDiedError(RayTaskError("__init__", "traceback", ValueError("no snapshot")))
    assert not is_lost_controller(in_its_start)
    assert not is_lost_controller(ActorUnavailableError("it may live", None))
    assert not is_lost_controller(KeyboardInterrupt())


def test_the_driver_learns_how_many_attempts_there_were_and_what_the_last_one_held():
    monitor, first, second = Monitor(), object(), object()
    assert monitor.end_attempt() == (0, None)
    monitor.begin_attempt(first)  # type: ignore[arg-type]
    monitor.begin_attempt(second)  # type: ignore[arg-type]  # Ray Train restarted the workers
    assert monitor.end_attempt() == (2, second)
    assert monitor.end_attempt() == (2, None)  # the next controller ended before its workers began


def test_what_a_run_waits_for_its_first_workers_is_counted_once():
    began = time.monotonic()
    monitor = Monitor()
    time.sleep(0.01)
    assert 0.01 <= monitor.begin_attempt(None) <= time.monotonic() - began
    assert monitor.begin_attempt(None) == 0.0  # the checkpoint has counted it


def test_what_several_workers_report_is_shown_once():
    monitor = Monitor()
    for number in (0, 0, 0, 1):
        monitor.buffer_once(f"engine:{number} was lost", f"engine {number} was lost: killed")
    lines = [text for kind, text in monitor.drain({}) if kind == "message"]
    assert [line.partition(" was")[0] for line in lines] == ["engine 0", "engine 1"]


def test_the_advice_names_the_key():
    assert advice(0).startswith("max_failures (0): the process of Ray Train's controller ended")


def test_prints_of_the_users_ray_train_callback_are_shown(capsys: pytest.CaptureFixture[str]):
    class Watch(UserCallback):
        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            print("step", metrics[0]["step"])
            print("done")

        def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
            print(len(worker_exceptions), "failed")
            raise KeyError("its own")

    shown: list[tuple[str, str]] = []
    tell = SimpleNamespace(remote=lambda kind, text: shown.append((kind, text)))
    monitor: Any = SimpleNamespace(tell=tell)
    callback = PrintingCallback(Watch(), monitor)
    context: Any = None
    callback.after_report(run_context=context, metrics=[{"step": 3}], checkpoint=None)
    with pytest.raises(KeyError):
        callback.after_exception(run_context=context, worker_exceptions={0: ValueError()})
    lines = ["printed: step 3", "printed: done", "printed: 1 failed"]
    assert shown == [("message", line) for line in lines]
    assert capsys.readouterr().out == ""
