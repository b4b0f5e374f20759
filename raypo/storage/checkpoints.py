"""Search, ranking and integrity checks of a run's checkpoints. Needs Ray Train's files, not Ray."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from typing_extensions import Buffer

from raypo.config import ConfigError
from raypo.pending_work import moved
from raypo.ray_internals import CHECKPOINTS, checkpoint_list
from raypo.storage.folder import below, parent_and_name
from raypo.storage.retries import write_text
from raypo.storage.run_files import BEST, RunFiles

STATE = "run.json"
"""File in a checkpoint with the run's own state."""
BEST_STEP = "best.json"
"""File in `best/` with the metric, its value and the step."""
SEGMENT = "segment.json"
"""File of a pbt trial that names its last checkpoint (see `raypo.tuning.population`)."""


def find_checkpoint(location: str) -> str:
    """Return the path or URI of the checkpoint that a user names.

    Args:
        location: Location of a run, of its `best/`, or of a checkpoint. A run stands for its newest
            checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or the run's list of checkpoints is cut short.
    """
    files = RunFiles.at(location)
    if files.read(STATE) is not None:
        return files.location
    run, step = files, None
    if files.name == BEST and (best := files.read(BEST_STEP)) is not None:
        run, step = RunFiles.at(parent_and_name(files.location)[0]), json.loads(best)["step"]
    if step is None and (of_segment := _checkpoint_of_segment(run)) is not None:
        return of_segment
    content = run.read(CHECKPOINTS)
    try:
        snapshot = {} if content is None else json.loads(content)
    except ValueError:
        raise ConfigError(
            f"from_checkpoint ({location}): its {CHECKPOINTS} is truncated. Name one of its "
            f"folders: {', '.join(sorted(_folders(run)))}."
        ) from None
    listed: list[dict[str, Any]] = snapshot.get("checkpoint_results", [])
    wanted = [snapshot.get("latest_checkpoint_result")]
    if step is not None:
        wanted = [result for result in listed if result["metrics"].get("step") == step]
    if not wanted or wanted[-1] is None:
        what = f"the checkpoint of step {step} is gone" if step else "there is no checkpoint"
        raise ConfigError(
            f"from_checkpoint ({location}): {what}. Give the folder of a run that has written a "
            f"checkpoint, its {BEST}/, or a checkpoint_* folder."
        )
    return below(run.location, wanted[-1]["checkpoint_dir_name"])


def _checkpoint_of_segment(run: RunFiles) -> str | None:
    """Return the last checkpoint of a pbt trial, or None if `run` is no such trial or has none."""
    segment = run.read(SEGMENT)
    if segment is None or (checkpoint := json.loads(segment)["checkpoint"]) is None:
        return None
    folder, name = parent_and_name(checkpoint)
    return below(run.location, parent_and_name(folder)[1], name)  # the trial may have been moved


def run_of_checkpoint(checkpoint: str) -> RunFiles:
    """Return the run that a checkpoint's folder belongs to; for a segment of pbt, the trial."""
    folder = parent_and_name(checkpoint)[0]
    run, trial = RunFiles.at(folder), RunFiles.at(parent_and_name(folder)[0])
    return trial if not run.exists() and trial.read(SEGMENT) is not None else run


SCORE = "checkpoint/score"
"""Metric by which Ray Train ranks checkpoints. Higher is better, regardless of `best_mode`."""


def score_of(
    metrics: Mapping[str, float], *, best_by: str | None, best_mode: str
) -> dict[str, Any]:
    """Return the score that ranks a step's checkpoint; empty if `checkpoint.best_by` is not set.

    The score is the metric of `checkpoint.best_by`, or its negative, so that higher is better.
    """
    if best_by is None:
        return {}
    # A step that did not measure the metric gets the lowest score. Without a score, Ray 2.60 ranks
    # such a checkpoint as the best under the order `min` and deletes the real best. With NaN as the
    # score, Ray writes null, and each later resume fails with a TypeError.
    value = metrics.get(best_by, math.nan) * (1 if best_mode == "max" else -1)
    return {SCORE: value if math.isfinite(value) else -sys.float_info.max}


MANIFEST = "manifest.json"
"""File in a checkpoint of an earlier version, which has one manifest for all workers."""


class DamagedCheckpointError(ConfigError):
    """Raised if a run has no intact checkpoint to start from."""


class DigestedFile:
    """Binary file that is digested as it is written, so that nobody has to read it again.

    It has the methods that `torch.save` calls. What is written is never changed afterwards.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, xxhash.xxh3_64(), 0

    def write(self, data: Buffer) -> int:
        """Write all bytes and add them to the digest."""
        self._digest.update(data)
        written = self._file.write(data)
        moved()
        self._size += written
        return written

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    @property
    def entry(self) -> list[Any]:
        """The file's entry in the manifest: the size in bytes and the xxh3 digest."""
        return [self._size, self._digest.hexdigest()]


def write_manifest(
    directory: Path, rank: int, count: int, digested: Mapping[str, list[Any]]
) -> None:
    """Write the manifest of the files that a worker has written. Call it last.

    Args:
        directory: The worker's folder with its files of the checkpoint.
        rank: Rank of the worker.
        count: Number of workers.
        digested: Entries of the files that were digested as they were written. All other files are
            read.
    """
    manifest = directory / manifest_of(rank, count)
    manifest.unlink(missing_ok=True)  # of an attempt that failed later
    others = [path for path in directory.iterdir() if path.name not in digested]
    files = {path.name: [path.stat().st_size, _digest(path)] for path in others}
    write_text(manifest, json.dumps(files | dict(digested), indent=1))


def manifest_of(rank: int, count: int) -> str:
    """Return the name of a worker's manifest in a checkpoint of so many workers.

    Each worker has its own, so that no worker waits for the others while it writes.
    """
    return f"manifest_{rank}_of_{count}.json"


def damages(directory: Path, *, rank: int = 0, count: int = 1) -> list[str]:
    """Find the files of a checkpoint that are missing or differ from its manifest.

    Args:
        directory: Local folder of the checkpoint.
        rank: Rank of this worker. Each worker checks a part of the files.
        count: Number of workers.

    Returns:
        One message for each such file in this worker's part, or the one manifest that is damaged.
        Empty if all files are intact.
    """
    manifest: dict[str, list[Any]] = {}
    names = [MANIFEST if (directory / MANIFEST).exists() else "manifest_*.json"]
    if there := next(directory.glob("manifest_*_of_*.json"), None):
        writers = int(there.stem.rpartition("_")[2])
        names = [manifest_of(writer, writers) for writer in range(writers)]
    for name in names:
        try:
            manifest |= json.loads((directory / name).read_bytes())
        except (OSError, ValueError):
            return [f"{name} is missing or truncated"]
    problems: list[str] = []
    for name in sorted(manifest)[rank::count]:
        size, digest = manifest[name]
        path = directory / name
        if path.is_symlink() or path.parent != directory:
            problems.append(f"{name} is not a file of the checkpoint's folder")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _digest(path) != digest:
            problems.append(f"{name} has different content from what was written")
    return problems


def _digest(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def no_whole_checkpoint(
    damaged: Mapping[str, str], run: RunFiles, *, is_own: bool = True
) -> DamagedCheckpointError:
    """Return the error for a run whose checkpoints are all missing or corrupted.

    Args:
        damaged: Description of the problem of each checkpoint, by its path. At least one entry. The
            paths come from Ray Train and have no scheme.
        run: The run that has written the checkpoints.
        is_own: True if `run` is the run that starts, False if `from_checkpoint` names it.
    """
    lines = "".join(f"\n  {path}: {problem}" for path, problem in damaged.items())
    others = _folders(run) - {parent_and_name(path)[1] for path in damaged}
    remedy, give_up = "Restore them from a copy", "start over (--fresh; in Python fresh=True)"
    if others:
        remedy = f"Set from_checkpoint to {below(run.location, max(others))}"
    if not is_own:
        give_up = "begin with a model's weights: remove from_checkpoint and set model.policy"
    return DamagedCheckpointError(
        f"{run.location}: no checkpoint is intact:{lines}\n{remedy}, or {give_up}."
    )


def has_begun(files: RunFiles) -> bool:
    """Return True if a run has completed a step or written a checkpoint, which it would restore.

    A run may be killed between the checkpoint of its first step and that step's line of metrics.
    """
    return files.last_step() > 0 or files.read(CHECKPOINTS) is not None


def mend_list(files: RunFiles) -> str | None:
    """Rewrite Ray Train's list of checkpoints if it is cut short or names folders that are gone.

    Ray Train writes the list in place, so a kill or a full disk may cut it short. Ray Train could
    not start with such a list, or with a list that names a missing folder.

    Args:
        files: Folder in which Ray Train stores the checkpoints of a run that is about to start.

    Returns:
        A message if the list was rewritten.

    Raises:
        DamagedCheckpointError: no checkpoint is left.
    """
    if (content := files.read(CHECKPOINTS)) is None:
        return None
    folders = _folders(files)
    try:
        results = json.loads(content)["checkpoint_results"]
        listed = [(result["checkpoint_dir_name"], result["metrics"]) for result in results]
        # Storage may list a new folder late, but reads it at once.
        unlisted = {name for name, _ in listed} - folders
        folders |= {name for name in unlisted if files.read(f"{name}/{STATE}") is not None}
        remaining = [(name, metrics) for name, metrics in listed if name in folders]
        if len(remaining) == len(listed):
            return None
        gone = ", ".join(sorted({name for name, _ in listed} - folders))
        problem = f"checkpoints of it are missing: {gone}"
    except ValueError:
        section = (files.config() or {}).get("checkpoint", {})
        by = {"best_by": section.get("best_by"), "best_mode": section.get("best_mode", "max")}
        remaining = []
        for name in folders:
            with suppress(DamagedCheckpointError):
                if state := checkpoint_state(below(files.location, name)):
                    step, metrics = state["step"], state["metrics"]
                    remaining.append((name, {**metrics, "step": step, **score_of(metrics, **by)}))
        remaining.sort(key=lambda entry: (entry[1].get(SCORE, 0.0), entry[1]["step"]))
        problem = "it is truncated"
    if not remaining:
        raise no_whole_checkpoint({CHECKPOINTS: problem}, files)
    files.write(CHECKPOINTS, checkpoint_list(remaining))
    files.sync()
    return f"warning: {CHECKPOINTS} was rewritten, because {problem}"


def _folders(run: RunFiles) -> set[str]:
    return {name for name in run.names() if name.startswith("checkpoint_")} - {CHECKPOINTS}


def checkpoint_state(checkpoint: str) -> dict[str, Any]:
    """Return raypo's own state in a checkpoint: the step, and the state of the recipe.

    Raises:
        DamagedCheckpointError: the file is cut short.
    """
    try:
        return json.loads(RunFiles.at(checkpoint).read(STATE) or b"{}")
    except ValueError:
        raise DamagedCheckpointError(
            f"{checkpoint}: {STATE} is truncated. Restore it from a copy, or name another "
            "checkpoint in from_checkpoint."
        ) from None


def newest_step(files: RunFiles) -> int:
    """Return the step of a run's newest checkpoint, or 0 if it has none that can be read."""
    with suppress(ConfigError):
        return checkpoint_state(find_checkpoint(files.location)).get("step", 0)
    return 0
