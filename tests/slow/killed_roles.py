"""A callback whose module kills one role of a run in one phase after another.

The name of the run is the role; `ROLE.PHASE` is for a single phase. The run's folder has the
phases in which the role was killed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from raypo.deployment.replica import ReplicaClient
from raypo.learner.learner import Learner
from raypo.run import rollouts
from raypo.run.callbacks import StepView
from raypo.run.rollouts import Rollouts
from raypo.serving.client import EngineClient, ReferenceClient
from raypo.serving.engine import Engine
from raypo.storage.checkpoints import DigestedFile
from tests.integration.task import pid_of

PHASES = ["sampling", "scoring", "update", "push", "evaluation", "checkpoint", "between"]
"""Phases of a step, in their order. One is disturbed in each step, the first in the first."""
SERVED = ("engine", "reference", "reward_0")
KILLED = (*SERVED, "worker_0", "worker_1", "controller", "driver")
"""`worker_0` has the rollout controller; `controller` is that of Ray Train."""


class Now:
    step, name, folder = 0, "", Path()
    role = ""
    phases: ClassVar[list[str]] = PHASES
    num_ahead = 0
    """Steps whose sampling may begin before the loop takes their batch."""
    is_evaluating = False
    lock = threading.Lock()


def parent() -> psutil.Process:
    raylet = psutil.Process().parent()
    assert raylet is not None
    return raylet


def pid_of_actor(title: str) -> int:
    """Return the id of the other process with this title that the same Ray has started."""
    for process in parent().children():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and title in " ".join(process.cmdline()):
                return process.pid
    raise LookupError(title)


def pid_of_role() -> int:
    """Return the id of the process to kill; the first worker asks."""
    if Now.role == "worker_0":
        return os.getpid()
    if Now.role == "worker_1":
        return pid_of_actor("ray::RayTrainWorker")
    if Now.role == "controller":
        return pid_of_actor("ray::TrainController")
    if Now.role == "driver":
        return parent().ppid()
    return pid_of(f"raypo:{Now.name}:{Now.role}:0")


def reached(phase: str) -> None:
    """Kill the role if this is its next phase, and the step was not disturbed yet."""
    if os.environ["RANK"] != "0" or not Now.role:
        return
    record = Now.folder / "killed.txt"
    with Now.lock:  # several threads write a checkpoint
        killed = record.read_text().splitlines() if record.exists() else []
        if len(killed) < Now.step + Now.num_ahead and Now.phases[len(killed) :][:1] == [phase]:
            pid = pid_of_role()
            record.write_text("".join(f"{name}\n" for name in [*killed, phase]))
            os.kill(pid, signal.SIGKILL)
            if Now.role not in SERVED:
                time.sleep(600)  # the run ends here, and with it this process


def between(view: StepView) -> None:
    reached("between")


def reach(
    owner: Any, name: str, phase: str, *, when: Callable[..., bool] = lambda *args: True
) -> None:
    """Let a function reach a phase when it returns, if `when` holds for its arguments."""
    own = getattr(owner, name)

    def reaching(*args: Any, **named: Any) -> Any:
        result = own(*args, **named)
        if when(*args):
            reached("evaluation" if Now.is_evaluating else phase)
        return result

    setattr(owner, name, reaching)


def note_run_and_step() -> None:
    own, evaluate = Rollouts.take, rollouts.evaluate_policy

    def take(self: Rollouts, step: int, *args: Any) -> Any:
        config = self._run.config
        Now.folder = Path(config.storage_path) / config.name
        Now.step, Now.name = step, config.name
        Now.num_ahead = int(config.rollout.mode != "sync")
        role, _, phase = config.name.partition(".")
        Now.role = role if role in KILLED else ""
        Now.phases = [phase] if phase else PHASES
        return own(self, step, *args)

    def evaluate_policy(*args: Any, **named: Any) -> Any:
        Now.is_evaluating = True
        try:
            return evaluate(*args, **named)
        finally:
            Now.is_evaluating = False

    Rollouts.take = take  # pyright: ignore[reportAttributeAccessIssue]
    rollouts.evaluate_policy = evaluate_policy


def kill_in_phases() -> None:
    """Let a role be killed in `PHASES`. Its calls are in flight then."""
    note_run_and_step()
    reach(EngineClient, "generate", "sampling")
    reach(ReferenceClient, "log_probs", "scoring")
    reach(Learner, "_step", "update")
    is_bucket = lambda _, method, *args: method is Engine.load_bucket  # noqa: E731
    reach(ReplicaClient, "control", "push", when=is_bucket)
    reach(DigestedFile, "write", "checkpoint")


if "pytest" not in sys.modules:  # in a worker
    kill_in_phases()
