"""A callback whose module kills a learner worker at one point after another of a save.

The run's folder has the points at which its workers have been killed.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypo.learner import export
from raypo.learner.host_copies import HostCopies
from raypo.run import checkpoint_writer, run_checkpoints
from raypo.run.callbacks import StepView
from raypo.run.checkpoint_writer import CheckpointWriter
from raypo.run.run_checkpoints import Checkpoints
from raypo.storage.checkpoints import DigestedFile

POINTS = [
    "snapshot",
    "state half written",
    "state written",
    "model half written",
    "old model moved away",
    "best is linked",
    "first file in place",
    "all files in place",
]
STEP = 3
"""The step whose save is killed."""


class Now:
    step, folder = 0, Path()
    saved = 0
    """The step whose checkpoint is being written. `step` may be the next one already."""


def reached(point: str) -> None:
    """Kill this process if it is to be killed here."""
    record = Now.folder / "killed.txt"
    killed = record.read_text().splitlines() if record.exists() else []
    if Now.saved == STEP and len(killed) < len(POINTS) and POINTS[len(killed)] == point:
        record.write_text("".join(f"{each}\n" for each in [*killed, point]))
        os.kill(os.getpid(), signal.SIGKILL)


def watch(view: StepView) -> None:
    Now.step = view.step


def kill(
    owner: Any,
    name: str,
    point: str,
    *,
    before: bool = False,
    when: Callable[..., bool] = lambda *args: True,
) -> None:
    """Let a function reach a point before or after its call, if `when` holds for its arguments."""
    own = getattr(owner, name)

    def reaching(*args: Any, **named: Any) -> Any:
        if before:
            reached(point)
        result = own(*args, **named)
        if not before and when(*args):
            reached(point)
        return result

    setattr(owner, name, reaching)


def note_folder(checkpoints: Checkpoints) -> bool:
    Now.folder = checkpoints.run.files.folder
    return True


def note_step() -> bool:
    Now.saved = Now.step
    return True


def kill_at_points() -> None:
    """Let this process be killed at `POINTS`."""
    kill(Checkpoints, "_fits_beside", "", when=lambda self, *_: note_folder(self))
    kill(CheckpointWriter, "wait", "", when=lambda self: note_step())
    kill(HostCopies, "of", "snapshot")
    kill(DigestedFile, "write", "state half written")
    kill(run_checkpoints, "write_manifest", "state written", before=True)
    kill(export, "_name_parts", "model half written", before=True)
    kill(Path, "rename", "old model moved away", when=lambda _, to: to.name == "policy.old")
    kill(Checkpoints, "_link_best", "best is linked")
    kill(shutil, "move", "first file in place")
    kill(checkpoint_writer, "_move_into_place", "all files in place")


if "pytest" not in sys.modules:  # in a worker
    kill_at_points()
