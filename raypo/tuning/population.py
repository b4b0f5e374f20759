"""Population-based training: trials begin again from other trials' checkpoints.

Ray Tune copies checkpoints from trial to trial; what it copies here is a pointer, a folder with one
small file that names the run's own checkpoint: policy, critic, optimizers, KL controller, cursor.

Paper: Jaderberg et al. 2017, arXiv:1711.09846.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.train import Checkpoint, CheckpointConfig, RunConfig, UserCallback
from ray.util.queue import Empty, Queue

from raypo.metrics.run_files import RunFiles
from raypo.tuning.goal import Goal, as_report, known_metrics

POINTER, SEGMENT = "pointer.json", "segment.json"
POLL_S = 0.5
KEPT_CHECKPOINTS = 3
"""At least: a copy of the last one or two may begin while the trial has gone on."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a trial's run between two copies; Ray Train resumes within it by itself."""

    number: int
    resume_from: str | None
    """The copied checkpoint."""
    storage_path: str

    def run_config(self, run_config: RunConfig) -> RunConfig:
        """Ray's run config, in a folder of the segment's own."""
        kept = run_config.checkpoint_config or CheckpointConfig()
        num_to_keep = max(kept.num_to_keep or 0, KEPT_CHECKPOINTS)
        return dataclasses.replace(
            run_config,
            name=f"segment_{self.number}",
            storage_path=self.storage_path,
            checkpoint_config=dataclasses.replace(kept, num_to_keep=num_to_keep),
        )


def next_segment(files: RunFiles, pointer: Any | None) -> Segment:
    """The segment to run: a new one where Tune hands out another trial's checkpoint."""
    content = files.read(SEGMENT)
    state = json.loads(content) if content else {"number": 0, "resume_from": None}
    if pointer is not None:
        with pointer.as_directory() as folder:
            target = json.loads((Path(folder) / POINTER).read_text())
        if target["trial"] != files.name:
            state = {"number": state["number"] + 1, "resume_from": target["checkpoint"]}
            files.write(SEGMENT, json.dumps(state).encode())
            files.sync()
    return Segment(**state, storage_path=files.location)


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
    fit: Callable[[UserCallback], None], goal: Goal, known: Mapping[str, float], *, trial: str
) -> None:
    """Run a trial and report each step to Tune, with a pointer where there is a checkpoint.

    Args:
        fit: Runs the trial with a callback.
        known: Last known metrics of the trial.
        trial: Its name.
    """
    queue = Queue(actor_options={"num_cpus": 0})
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
        known = known_metrics([known, metrics])
        _report(as_report(known, goal), path, trial)
    if failures:
        raise failures[0]


def _report(report: dict[str, float], path: str | None, trial: str) -> None:
    if path is None:
        tune.report(report)
        return
    with tempfile.TemporaryDirectory(prefix="raypo-pointer-") as folder:
        pointer = json.dumps({"trial": trial, "checkpoint": path})
        (Path(folder) / POINTER).write_text(pointer)
        tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))
