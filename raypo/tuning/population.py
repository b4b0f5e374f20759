"""Population-based training: trials begin again from other trials' checkpoints.

Ray Tune copies checkpoints from trial to trial; what it copies here is a pointer, a folder with one
small file that names the run's own checkpoint: policy, critic, optimizers, KL controller, cursor.

Paper: Jaderberg et al. 2017, arXiv:1711.09846.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem, copy_files
from ray import tune
from ray.train import Checkpoint, CheckpointConfig, RunConfig, UserCallback
from ray.util.queue import Empty, Queue

from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import Goal, as_report, known_metrics

POINTER, SEGMENT, TAKEN = "pointer.json", "segment.json", "taken.json"
COPIED = "copied"
"""Folder of a segment: the checkpoint that it began with."""
POLL_S = 0.5
"""How often the run of a trial is looked at for its end."""
KEPT_CHECKPOINTS = 3
"""At least: Tune may decide for the last but one of them while the trial goes on."""
KEPT_SEGMENTS = 2
"""The last one's first checkpoint may still be on its way to another trial."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a trial's run between two copies; Ray Train resumes within it by itself."""

    number: int
    storage_path: str
    known: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What was known of the trial that was copied, where the segment has just begun."""

    @property
    def location(self) -> str:
        """Its folder."""
        return f"{self.storage_path.rstrip('/')}/segment_{self.number}"

    @property
    def resume_from(self) -> str | None:
        """The trial's own copy of the checkpoint that it begins with."""
        return f"{self.location}/{COPIED}" if self.number else None

    def run_config(self, run_config: RunConfig) -> RunConfig:
        """Ray's run config, in a folder of the segment's own."""
        kept = run_config.checkpoint_config or CheckpointConfig()
        num_to_keep = max(kept.num_to_keep or 0, KEPT_CHECKPOINTS)
        return dataclasses.replace(
            run_config,
            name=Path(self.location).name,
            storage_path=self.storage_path,
            checkpoint_config=dataclasses.replace(kept, num_to_keep=num_to_keep),
        )


def next_segment(files: RunFiles, pointer: Any | None) -> Segment:
    """The segment to run: a new one where Tune hands out another trial's checkpoint."""
    segment = take_along(files, pointer) if pointer else None
    if segment is None:
        return _last_segment(files)
    files.write(SEGMENT, json.dumps({"number": segment.number}).encode())
    files.sync()
    if segment.number >= KEPT_SEGMENTS:
        remove_folder(Segment(segment.number - KEPT_SEGMENTS, files.location).location)
    return segment


def take_along(files: RunFiles, pointer: Any) -> Segment | None:
    """Copy another trial's checkpoint into the segment that a trial begins with it; once.

    The driver does it when the scheduler decides: before the trial has started again, the other
    one may have gone on and deleted the checkpoint.

    Args:
        files: Of the trial that begins again.

    Returns:
        The segment; None where the checkpoint is the trial's own.

    Raises:
        OSError: the checkpoint is gone.
    """
    with pointer.as_directory() as folder:
        target = json.loads((Path(folder) / POINTER).read_text())
    if target["trial"] == files.name:
        return None
    number = _last_segment(files).number + 1
    segment = Segment(number, files.location, target["known"])
    taken = {"number": number, "checkpoint": target["checkpoint"]}
    if json.loads(files.read(TAKEN) or "null") != taken:
        copy_checkpoint(target["checkpoint"], f"{segment.location}/{COPIED}")
        files.write(TAKEN, json.dumps(taken).encode())
        files.sync()
    return segment


def _last_segment(files: RunFiles) -> Segment:
    state = json.loads(files.read(SEGMENT) or '{"number": 0}')
    return Segment(state["number"], files.location)


def copy_checkpoint(source: str, target: str) -> None:
    """Of another trial, which will delete its own some time; on one disk by hard links.

    Args:
        source: A local path or a URI, as the target is.
    """
    if "://" in source:
        system, path = FileSystem.from_uri(source)
        into = FileSystem.from_uri(target)[1]
        copy_files(path, into, source_filesystem=system, destination_filesystem=system)
        return
    shutil.rmtree(target, ignore_errors=True)  # of an attempt that was killed
    shutil.copytree(source, target, copy_function=_link)


def remove_folder(location: str) -> None:
    """Nothing happens where it is gone already."""
    with suppress(FileNotFoundError):
        system, path = FileSystem.from_uri(location)
        system.delete_dir(path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copy2(source, target)


class QueuedReports(UserCallback):
    """Each step's metrics, and where its checkpoint is, into a queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def after_report(
        self,
        run_context: Any,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Ray Train calls it in its controller after each report of the workers."""
        self._queue.put((metrics[0], checkpoint.path if checkpoint else None))


def run_with_pointers(
    fit: Callable[[UserCallback], None],
    goal: Goal,
    known: Mapping[str, float],
    *,
    trial: str,
    segment: Segment,
) -> None:
    """Run a trial and report each step to Tune, with a pointer where there is a checkpoint.

    Args:
        fit: Runs the trial with a callback.
        known: Last known metrics of the trial.
        trial: Its name.
    """
    queue = Queue(maxsize=1, actor_options={"num_cpus": 0})  # a run waits until Tune knows its step
    failures: list[BaseException] = []

    def run() -> None:
        try:
            fit(QueuedReports(queue))
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    # A daemon: the process of a trial that Tune stops must not wait for its run.
    thread = threading.Thread(target=run, name="raypo-trial", daemon=True)
    thread.start()
    while thread.is_alive() or not queue.empty():
        try:
            metrics, path = queue.get(timeout=POLL_S)
        except Empty:
            continue
        known = known_metrics([known, metrics], goal)
        pointer = None
        if path is not None:  # without the scheme of a URI
            checkpoint = f"{segment.location}/{Path(path).name}"
            pointer = {"trial": trial, "checkpoint": checkpoint, "known": known}
        _report(as_report(known, goal), pointer)
    if failures:
        raise failures[0]


def _report(report: dict[str, float], pointer: Mapping[str, Any] | None) -> None:
    if pointer is None:
        tune.report(report)
        return
    with tempfile.TemporaryDirectory(prefix="raypo-pointer-") as folder:
        (Path(folder) / POINTER).write_text(json.dumps(pointer))
        tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))
