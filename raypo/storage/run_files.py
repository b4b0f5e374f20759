"""Files of one run in <storage_path>/<name>/: metrics, rollouts, config, summary."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from raypo.config import ConfigError
from raypo.config.base import RECORDED_BASE, escaped, unescaped
from raypo.storage.folder import (
    STAGE,
    TEMPORARY,
    RemoteFolder,
    finite,
    open_folder,
    parent_and_name,
    replace_file,
)
from raypo.storage.parquet import from_parquet, to_parquet
from raypo.storage.retries import retried

if TYPE_CHECKING:
    import pyarrow as pa

_METRICS, _CONFIG, _SUMMARY = "metrics.jsonl", "config.yaml", "summary.json"
_INPUTS = "inputs.json"
_ROLLOUTS, _LOGS, _TIMELINE = "rollouts", "logs", "timeline"
HANGS = "hangs"
"""Folder with the stacks of a run's processes, a folder for each hang."""
BEST = "best"
"""Folder with the models of the best step by `checkpoint.best_by`, and a file with that step."""
_MODELS = ("policy", "critic", "adapter", "reward_model", BEST)
"""Folders of trained models."""
GIVEN_ROWS = "given_rows"
"""Folder of rows that were passed to the trainer in Python."""
GIVEN_MODELS = "given_models"
"""Folder of models that were passed to the trainer in Python."""
_BEFORE_CONFIG = re.compile(
    rf"{_LOGS}|{GIVEN_ROWS}|{GIVEN_MODELS}|\.validate_storage_marker|{re.escape(TEMPORARY)}.*"
)
"""Files that a run may leave if it dies before it writes its config. The marker is Ray Train's."""
_WRITTEN = re.compile(
    rf"{_METRICS}|{_CONFIG}|{_SUMMARY}|{_INPUTS}|{_ROLLOUTS}|{_TIMELINE}|{HANGS}|checkpoint_.*|"
    rf"{'|'.join(_MODELS)}"
)
"""Names that a run writes. A user's own files, such as its log, may lie beside them."""
_ROLLOUT_NAME = re.compile(r"(step|held_out)_(\d+)\.parquet")


def _real(path: str) -> str:
    """Return a local path, also of a file:// URI, without links; and a URI without its options."""
    path = path.removeprefix("file://")
    return path.partition("?")[0] if "://" in path else os.path.realpath(path)


def is_given(path: str) -> bool:
    """Return whether a path or URI is a file of rows that a trainer was given in Python."""
    return parent_and_name(parent_and_name(path)[0])[1] == GIVEN_ROWS


class RunFiles:
    """Reader and writer of the files of one run.

    In a local folder writes are immediate. With a URI (s3://, gs://, file://), writes go to a
    temporary local folder, and `sync` copies the changed files. Reads return the content that this
    process wrote since the last `sync`, if any, or the content at the URI. Only one process writes
    metrics and rollouts.
    """

    def __init__(self, storage_path: str, name: str) -> None:
        self.name = name
        self._folder = open_folder(storage_path, name)
        self.folder = self._folder.path
        """Local folder that files are written to."""
        self.location = self._folder.location
        """Final location of the files, for messages: a path or a URI."""
        self.is_local = not isinstance(self._folder, RemoteFolder)
        """True if files are written in place, without a URI."""
        self.best_dir = self.folder / BEST
        self.logs_dir = self.folder / _LOGS
        self._has_whole_lines = False

    @classmethod
    def at(cls, location: str) -> RunFiles:
        """Return the `RunFiles` of a run, given its folder or URI."""
        if "://" in location:
            storage_path, name = parent_and_name(location)
        else:  # a folder's last name may be "." or ".."
            storage_path, name = os.path.split(os.path.abspath(Path(location).expanduser()))
        return cls(storage_path, name)

    def new_stage(self) -> Path:
        """Create a folder inside `folder`, in which a checkpoint is written. It is never synced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=STAGE, dir=self.folder))

    def clear_stages(self) -> None:
        """Remove the incomplete checkpoint of an attempt that died."""
        for path in self.folder.glob(f"{STAGE}*"):
            shutil.rmtree(path, ignore_errors=True)

    def check_writable(self) -> None:
        """Refuse a place where this process cannot write, before anything is started.

        Raises:
            ConfigError: a small file could not be written.
        """
        self._folder.check_writable()

    def exists(self) -> bool:
        """Return True if the run has a config, which means that it was started before."""
        return self._folder.read(_CONFIG) is not None

    def sync(self, *, models: bool | None = None) -> None:
        """Copy changed files to the URI. A no-op for a local folder.

        Args:
            models: True copies only the trained models, False all other files. None copies all
                files.
        """
        self._folder.sync(lambda name: models is None or models == _is_model(name))

    def log_path(self, name: str) -> Path:
        """Return the local path of a file in `logs/`, with the content of earlier attempts."""
        return self._folder.stage(f"{_LOGS}/{name}")

    def close(self) -> None:
        """Remove the local copies of files at a URI, unless a checkpoint is still staged.

        Call `sync` before, because other content is lost. A no-op for a local folder.
        """
        self._folder.close()

    # Metrics: one JSON object per line.

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line of a step. Values that are not finite become null."""
        path = self._folder.stage(_METRICS)
        line = json.dumps(finite({"step": step, **metrics}))

        def append() -> None:
            if not self._has_whole_lines:  # after a killed process, or a failed attempt
                self._drop_torn_line()
            self._has_whole_lines = False
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
            self._has_whole_lines = True

        retried(append, f"writing {_METRICS}")

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics by step. Null becomes NaN, and an incomplete last line is dropped."""
        content = self._folder.read(_METRICS) or b""
        rows = [json.loads(line) for line in _whole_lines(content).splitlines()]
        return [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]

    def last_step(self) -> int:
        """Return the last step whose line is in metrics.jsonl, or 0 if there is none.

        A step is complete once its metrics line is written. Other output without such a line, such
        as the rollouts of an interrupted update, is ignored.
        """
        lines = _whole_lines(self._folder.read(_METRICS) or b"").splitlines()
        return json.loads(lines[-1])["step"] if lines else 0

    def truncate(self, after_step: int) -> None:
        """Remove metrics and rollouts of steps after `after_step`, which a resumed run repeats.

        The summary of the earlier attempt is removed too, because it counts these steps.
        """
        self._folder.delete(_SUMMARY)
        content = self._folder.read(_METRICS)
        if content is not None:
            lines = _whole_lines(content).splitlines(keepends=True)
            content = b"".join(line for line in lines if json.loads(line)["step"] <= after_step)
            replace_file(self._folder.local(_METRICS), content)
            self._has_whole_lines = True
        for name in self._folder.names(_ROLLOUTS):
            match = _ROLLOUT_NAME.fullmatch(name)
            if match and int(match[2]) > after_step:
                self._folder.delete(f"{_ROLLOUTS}/{name}")

    def _drop_torn_line(self) -> None:
        path = self._folder.local(_METRICS)
        if path.exists():
            content = path.read_bytes()
            if content != _whole_lines(content):
                replace_file(path, _whole_lines(content))

    # Rollouts, config and summary: whole files.

    def write_rollouts(self, step: int, table: pa.Table, *, held_out: bool = False) -> None:
        """Write `rollouts/step_00001.parquet`.

        Args:
            step: The step; 0 means before the first update.
            table: A `rollout_table`.
            held_out: True for an evaluation: `rollouts/held_out_00000.parquet`.
        """
        name, content = _rollouts_name(step, held_out), to_parquet(table)
        retried(lambda: replace_file(self._folder.local(name), content), f"writing {name}")

    def rollout_steps(self, *, held_out: bool = False) -> list[int]:
        """Return the completed steps with saved rollouts (or held-out samples), ascending."""
        names = [_ROLLOUT_NAME.fullmatch(name) for name in self._folder.names(_ROLLOUTS)]
        kind, last_step = "held_out" if held_out else "step", self.last_step()
        steps = (int(match[2]) for match in names if match and match[1] == kind)
        return sorted(step for step in steps if step <= last_step)

    def rollouts(
        self, step: int, *, held_out: bool = False, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the rollouts (or held-out samples) of a step as rows, or [] if there are none.

        Args:
            step: The step.
            held_out: True for the samples of an evaluation.
            columns: Columns to read. None means all.
        """
        content = self._folder.read(_rollouts_name(step, held_out))
        if content is None:
            return []
        return from_parquet(content, columns).to_pylist()

    def append_timeline(self, worker: str, line: Mapping[str, Any]) -> None:
        """Append a line to `timeline/<worker>.jsonl`. Each worker has its own file."""
        path = self._folder.stage(f"{_TIMELINE}/{worker}.jsonl")

        start = ""

        def append() -> None:  # readers skip empty lines, and a line that a full disk has cut
            nonlocal start
            content, start = f"{start}{json.dumps(line)}\n", "\n"  # a second attempt ends that line
            with path.open("a", encoding="utf-8") as file:
                file.write(content)

        retried(append, f"writing {path.name}")

    def timeline(self) -> list[dict[str, Any]]:
        """Return the lines of all workers, worker by worker. Incomplete lines are dropped."""
        lines: list[dict[str, Any]] = []
        for name in self._folder.names(_TIMELINE):
            for line in (self._folder.read(f"{_TIMELINE}/{name}") or b"").splitlines():
                try:
                    lines.append(json.loads(line))
                except json.JSONDecodeError:
                    continue  # its writer was killed, or is writing
        return lines

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write the resolved config, as plain nested values."""
        text = yaml.safe_dump(escaped(values), sort_keys=False, allow_unicode=True)
        replace_file(self._folder.local(_CONFIG), text.encode())

    def config(self) -> dict[str, Any] | None:
        """Return the resolved config, or None if there is none."""
        content = self._folder.read(_CONFIG)
        return None if content is None else unescaped(yaml.safe_load(content))

    def write_inputs(self, text: str) -> None:
        """Write `inputs.json`: digests of the files that the config names (see `raypo.inputs`)."""
        replace_file(self._folder.local(_INPUTS), text.encode())

    def inputs(self) -> dict[str, Any] | None:
        """Return the content of `inputs.json`, or None if there is none."""
        content = self._folder.read(_INPUTS)
        return None if content is None else json.loads(content)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file atomically."""
        replace_file(self._folder.local(name), content)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if it does not exist."""
        return self._folder.read(name)

    def written_at(self, name: str) -> float | None:
        """Return a file's modification time in seconds since 1970, or None without the file."""
        return self._folder.written_at(name)

    def names(self) -> list[str]:
        """Return the sorted names in the run folder, or [] if the folder does not exist."""
        return self._folder.names()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `summary.json`. Values that are not finite become null.

        Changed input files that the run has accepted are added as `accepted_inputs`.
        """
        if accepted := (self.inputs() or {}).get("accepted"):
            summary = {**summary, "accepted_inputs": accepted}
        text = json.dumps(finite(summary), indent=2) + "\n"
        replace_file(self._folder.local(_SUMMARY), text.encode())

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, or None if there is none."""
        content = self._folder.read(_SUMMARY)
        return None if content is None else json.loads(content)

    # The folder as a whole.

    def remove(
        self, config: Mapping[str, Any] | None = None, *, kind: Literal["run", "sweep"] = "run"
    ) -> None:
        """Remove what a run or sweep has written, except what may be the only copy.

        That is its config.yaml, which a new start replaces, and the rows and models given in Python
        that the config of the new start names.

        Args:
            config: Config of the new start, as plain nested values.
            kind: What the folder holds.

        Raises:
            ConfigError: as `check_removable`.
        """
        self.check_removable(kind=kind)
        text = json.dumps(config or {})
        given_files = [
            f"{folder}/{name}"
            for folder in (GIVEN_ROWS, GIVEN_MODELS)
            for name in self._folder.names(folder)
            if name in text  # it contains a hash
        ]
        self._folder.remove(keep=[*given_files, *([_CONFIG] if self.exists() else [])])

    def would_remove(self, path: str) -> bool:
        """Return whether `remove` would delete a file that a config names.

        Args:
            path: An absolute path or a URI.
        """
        folder, path = _real(self.location), _real(path)
        given_folders = tuple(f"{folder}/{name}/" for name in (GIVEN_ROWS, GIVEN_MODELS))
        return f"{path}/".startswith(f"{folder}/") and not path.startswith(given_folders)

    def check_removable(self, *, kind: Literal["run", "sweep"] = "run") -> None:
        """Refuse to remove a folder that was not written by a run or sweep of this name.

        Raises:
            ConfigError: the folder holds something else.
        """
        config = self.config()
        is_mapping = isinstance(config, dict)
        found_kind = "sweep" if is_mapping and RECORDED_BASE in config else "run"
        is_this_run = is_mapping and config.get("name") == self.name and found_kind == kind
        strangers = [n for n in self._folder.names() if not _BEFORE_CONFIG.fullmatch(n)]
        strangers.sort(key=_CONFIG.__eq__)  # config.yaml last: other names explain more
        if strangers and not is_this_run:
            raise ConfigError(
                f"name ({self.name}): {self.location} is not the folder of such a {kind}, "
                f"because it holds {strangers[0]}, so it is not removed. Choose another name or "
                "storage_path, or remove the folder yourself."
            )

    def check_unused(self) -> None:
        """Refuse a folder that has no config but holds files under names that a run writes.

        Raises:
            ConfigError: the folder has such files. A run could overwrite them.
        """
        taken = [name for name in self._folder.names() if _WRITTEN.fullmatch(name)]
        if taken and not self.exists():
            raise ConfigError(
                f"name ({self.name}): {self.location} holds {taken[0]}, but no config.yaml, so it "
                "is not a run's folder and its files could be overwritten. Choose another name "
                "or storage_path, or move the files away."
            )

    def is_running(self) -> bool | None:
        """Return whether a process holds the run's lock, or None for a URI, which has no lock."""
        if not self.is_local:
            return None
        if not self._lock_path.exists():
            return False
        try:
            with self.lock(timeout_s=0.0):
                return False
        except ConfigError:
            return True

    @property
    def _lock_path(self) -> Path:
        # The lock file lies beside the folder, because `remove` deletes the folder under the lock.
        return self.folder.parent / f".{self.name}.lock"

    @contextmanager
    def lock(self, *, timeout_s: float = 1.0) -> Iterator[None]:
        """Hold the run's lock. A no-op for a URI, which has no lock.

        Args:
            timeout_s: Seconds to wait for the lock. The default is above 0 because `is_running`
                holds the lock for an instant, and `raypo monitor` calls that every few seconds.

        Raises:
            ConfigError: another process holds the lock.
        """
        if not self.is_local:
            yield
            return
        from filelock import FileLock, Timeout

        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._lock_path)
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise ConfigError(
                f"name ({self.name}): another process is running in {self.location}. "
                "Wait until it has ended, stop it, or choose another name."
            ) from None
        try:
            yield
        finally:
            lock.release()


def close_files(files: RunFiles) -> None:
    """Copy the rest of the files to the URI, also of a step that failed, and remove local copies.

    The models are left out, because a failed run may have written only a part of them. Errors are
    logged, not raised: they would hide the error that ends the run.
    """
    try:
        files.sync(models=False)
    except Exception:
        logging.getLogger(__name__).exception("the last files were not copied to the URI")
    files.close()


def policy_of(model: str) -> tuple[str, Path | None]:
    """Resolve a model's folder and its run's config.

    Args:
        model: Folder of a run, or of its best step, or of a model; or a hub id.

    Returns:
        policy: Folder or hub id of the model.
        config: Path of the run's config, or None if `model` names no run.
    """
    run = Path(model).expanduser()
    of_run = run.parent if run.name == BEST else run
    if (of_run / "config.yaml").is_file() and (run / "policy").is_dir():
        return str(run / "policy"), of_run / "config.yaml"
    return model, None


def _is_model(name: str) -> bool:
    """Return True for a folder of a model, also while it is written (`policy.new`)."""
    return name.partition(".")[0] in _MODELS


def _rollouts_name(step: int, held_out: bool) -> str:
    return f"{_ROLLOUTS}/{'held_out' if held_out else 'step'}_{step:05d}.parquet"


def _whole_lines(content: bytes) -> bytes:
    """Drop a last line that is incomplete because its writer was killed."""
    return content[: content.rfind(b"\n") + 1]
