"""Locate the checkpoints of a run, reading the files of Ray Train without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from raypo.config import ConfigError
from raypo.ray_internals import CHECKPOINTS
from raypo.storage.folder import below, parent_and_name
from raypo.storage.run_files import BEST, RunFiles

STATE = "run.json"
"""File in a checkpoint with the run's own state."""
BEST_STEP = "best.json"
"""File in `best/` with the metric, its value and the step."""


def find_checkpoint(place: str) -> str:
    """Return the path or URI of the checkpoint that a user names.

    Args:
        place: Location of a run (meaning its newest checkpoint), of its `best/`, or of a
            checkpoint.

    Raises:
        ConfigError: there is no checkpoint.
    """
    files = RunFiles.at(place)
    if files.read(STATE) is not None:
        return files.location
    run, step = files, None
    if files.name == BEST and (best := files.read(BEST_STEP)) is not None:
        run, step = RunFiles.at(parent_and_name(files.location)[0]), json.loads(best)["step"]
    snapshot = json.loads(run.read(CHECKPOINTS) or b"{}")
    listed: list[dict[str, Any]] = snapshot.get("checkpoint_results", [])
    wanted = [snapshot.get("latest_checkpoint_result")]
    if step is not None:
        wanted = [each for each in listed if each["metrics"].get("step") == step]
    if not wanted or wanted[-1] is None:
        what = f"the checkpoint of step {step} is gone" if step else "no checkpoint is there"
        raise ConfigError(
            f"from_checkpoint ({place}): {what}. Give the folder of a run that has reached one, "
            f"its {BEST}/, or a checkpoint_* folder."
        )
    return below(run.location, wanted[-1]["checkpoint_dir_name"])


SCORE = "checkpoint/score"
"""Metric by which Ray Train ranks checkpoints. Higher is better, regardless of `best_mode`."""


class DamagedCheckpointError(RuntimeError):
    """A file of a checkpoint is missing or unreadable."""


@contextmanager
def damage_named(directory: Path, run: RunFiles) -> Iterator[None]:
    """Convert errors of PyTorch, DeepSpeed or JSON about damaged files to one with a remedy.

    Args:
        directory: Local folder of the checkpoint.
        run: The run that resumes.

    Raises:
        DamagedCheckpointError: a file is missing or unreadable.
    """
    try:
        yield
    except (EOFError, OSError, UnpicklingError, JSONDecodeError, RuntimeError, KeyError) as error:
        if "out of memory" in str(error).lower():
            raise
        names = [name for name in run.names() if name.startswith("checkpoint_")]
        others = [below(run.location, name) for name in names if name != directory.name]
        remedy = (
            f"Begin a run of another name with from_checkpoint: {others[-1]}"
            if others
            else "Restore its files from a copy"
        )
        raise DamagedCheckpointError(
            f"{directory}: this checkpoint cannot be read, a file of it is missing or damaged "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}). {remedy}, or "
            f"start over (--fresh; in Python fresh=True)."
        ) from error


def checkpoint_state(checkpoint: str) -> dict[str, Any]:
    """Return the run's own state from a checkpoint: the step, and the state of its recipe."""
    return json.loads(RunFiles.at(checkpoint).read(STATE) or b"{}")


def config_of(checkpoint: str) -> dict[str, Any]:
    """Return the config of the run whose folder contains a checkpoint; empty if there is none."""
    return RunFiles.at(parent_and_name(checkpoint)[0]).config() or {}
