"""A callback whose module lets a run hang in one phase after another, each once.

The file `hung.txt` beside the policy has the phases that have hung, and when. The name of the run
says what is planted: "hangs", or "slow" for a run that is slow in every phase and hangs in none.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from raypo.deployment.replica import ReplicaClient
from raypo.learner.learner import Learner
from raypo.learner.trained_model import TrainedModel
from raypo.run import checkpoint_writer
from raypo.run.callbacks import StepView
from raypo.run.records import Records
from raypo.run.rollouts import Rollouts
from raypo.serving.client import EngineClient, ReferenceClient
from raypo.serving.engine import Engine
from raypo.storage.checkpoints import DigestedFile
from tests.integration.task import pid_of

PHASES = [
    *("sampling", "reward", "scoring", "update", "push", "evaluation", "collective"),
    *("checkpoint", "upload", "worker", "controller"),
]
"""Phases in their order. One hangs in each attempt of the run, the first in the first."""
LONG_S = 600.0


class Now:
    folder, name, began = Path(), "", 0.0


def is_due(phase: str) -> bool:
    """Return whether this phase hangs now, and record it."""
    if Now.name != "hangs":
        return False
    record = Now.folder / "hung.txt"
    hung = record.read_text().splitlines() if record.exists() else []
    is_first = not hung or float(hung[-1].split()[1]) < Now.began  # of this attempt
    if not is_first or [phase] != PHASES[len(hung) :][:1]:
        return False
    with record.open("a") as file:
        file.write(f"{phase} {time.time()}\n")
    return True


def hang(phase: str) -> None:
    if is_due(phase):
        time.sleep(LONG_S)


def stop(phase: str, role: str) -> None:
    if is_due(phase):
        os.kill(pid_of(f"raypo:{Now.name}:{role}:0"), signal.SIGSTOP)


def before(
    owner: Any, name: str, plant: Callable[[], None], *, when: Callable[..., bool] | None = None
) -> None:
    own = getattr(owner, name)

    def planted(*args: Any, **named: Any) -> Any:
        if when is None or when(*args):
            plant()
        return own(*args, **named)

    setattr(owner, name, planted)


def note_run() -> None:
    own = Rollouts.begin

    def begin(self: Rollouts, *args: Any, **named: Any) -> Any:
        config = self._run.config
        Now.folder, Now.name = Path(config.model.policy).parent, config.name
        Now.began = time.time()
        return own(self, *args, **named)

    Rollouts.begin = begin  # pyright: ignore[reportAttributeAccessIssue]


def is_bucket(replica: ReplicaClient, method: Any, *args: Any) -> bool:
    return method is Engine.load_bucket


def plant_hangs() -> None:
    if os.environ.get("RANK") == "0":
        before(EngineClient, "generate", lambda: stop("sampling", "engine"))
        before(ReferenceClient, "log_probs", lambda: stop("scoring", "reference"))
        before(ReplicaClient, "control", lambda: stop("push", "engine"), when=is_bucket)
        before(Rollouts, "_evaluate", lambda: stop("evaluation", "engine"))
        before(DigestedFile, "write", lambda: hang("checkpoint"))
        before(checkpoint_writer, "copy_to", lambda: hang("upload"))
        before(Records, "report", stop_controller)
    else:
        before(Learner, "_step", lambda: hang("update"))
        before(Records, "check_stop_rules", lambda: hang("collective"))
        before(Records, "check_stop_rules", lambda: stop_worker())


def stop_worker() -> None:
    if is_due("worker"):
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_controller() -> None:
    if is_due("controller"):
        raylet = psutil.Process().parent()
        assert raylet is not None
        for process in raylet.children():
            if "ray::TrainController" in " ".join(process.cmdline()):
                process.send_signal(signal.SIGSTOP)


def slow_down() -> None:
    def wait(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds if Now.name == "slow" else 0.0)

    before(TrainedModel, "backward", wait(2.0))
    before(DigestedFile, "write", wait(0.05))


def reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float:
    hang("reward")
    if Now.name == "slow":
        time.sleep(0.5)
    return sum(map(str.isdigit, solution_str)) / max(len(solution_str), 1)


def after_step(view: StepView) -> None:
    """Loads this module in the workers."""


if "pytest" not in sys.modules:  # in a worker
    note_run()
    plant_hangs()
    slow_down()
