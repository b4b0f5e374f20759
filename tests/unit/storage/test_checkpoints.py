"""Damage of a checkpoint's files is found; the checkpoint before it is the one to go on from."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import Checkpoint, CheckpointConfig
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from raypo.learner.state import write_tensors
from raypo.ray_internals import CHECKPOINTS, checkpoint_list
from raypo.storage.checkpoints import (
    MANIFEST,
    SCORE,
    STATE,
    DamagedCheckpointError,
    damages,
    manifest_of,
    mend_list,
    no_whole_checkpoint,
    write_manifest,
)
from raypo.storage.run_files import RunFiles

NAMES = ["learner_0.pt", "policy_0.pt", "policy_1.pt", "run.json"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoint_2"
    folder.mkdir(parents=True)
    for index, name in enumerate(NAMES):
        (folder / name).write_bytes(bytes(range(index, 200)) * 50_000)  # longer than a buffer
    for rank in range(2):
        own = tmp_path / str(rank)  # each worker writes into a folder of its own
        own.mkdir()
        for name in NAMES[rank::2]:
            shutil.copy(folder / name, own)
        write_manifest(own, rank, 2, {})
        shutil.copy(own / manifest_of(rank, 2), folder)
    return folder


def test_a_file_that_is_digested_as_it_is_written_has_the_entry_of_one_that_is_read(
    tmp_path: Path,
):
    entry = write_tensors(tmp_path / "a.pt", {"x": torch.arange(300_000), "n": 1})
    write_manifest(tmp_path, 0, 1, {"a.pt": entry})
    assert damages(tmp_path) == []
    write_manifest(tmp_path, 0, 1, {"a.pt": [entry[0], "0"]})
    assert damages(tmp_path) == ["a.pt has different content from what was written"]


def test_a_checkpoint_with_one_manifest_for_all_workers_is_whole_as_ever(checkpoint: Path):
    files: dict[str, Any] = {}
    for rank in range(2):
        files |= json.loads((checkpoint / manifest_of(rank, 2)).read_text())
        (checkpoint / manifest_of(rank, 2)).unlink()
    (checkpoint / MANIFEST).write_text(json.dumps(files))
    assert damages(checkpoint) == []
    (checkpoint / NAMES[0]).unlink()
    assert damages(checkpoint) == [f"{NAMES[0]} is missing"]


def test_a_whole_checkpoint_has_no_damage(checkpoint: Path):
    assert damages(checkpoint) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("truncated", "has 1000 bytes instead of"),
        ("empty", "has 0 bytes instead of"),
        ("gone", "is missing"),
        ("one bit", "has different content from what was written"),
    ],
)
def test_a_damaged_file_is_named_by_one_worker_of_several(
    checkpoint: Path, name: str, damage: str, told: str
):
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"truncated": content[:1000], "empty": b""}.get(damage, content))
    if damage == "gone":
        path.unlink()
    (found,) = damages(checkpoint)
    assert found.startswith(f"{name} {told}")
    assert [each for rank in range(3) for each in damages(checkpoint, rank=rank, count=3)] == [
        found
    ]


def test_files_elsewhere_are_not_of_the_checkpoint(checkpoint: Path):
    outside = checkpoint.parent / "outside"
    (checkpoint / NAMES[0]).rename(outside)
    (checkpoint / NAMES[0]).symlink_to(outside)
    assert damages(checkpoint) == [f"{NAMES[0]} is not a file of the checkpoint's folder"]
    for manifest in checkpoint.glob("manifest_*"):
        manifest.unlink()
    (checkpoint / MANIFEST).write_text(json.dumps({"../outside": [1, ""]}))
    assert damages(checkpoint) == ["../outside is not a file of the checkpoint's folder"]


@pytest.mark.parametrize("damage", ["gone", "truncated"])
def test_without_a_manifest_it_is_not_whole_for_any_worker(checkpoint: Path, damage: str):
    name = manifest_of(1, 2)
    if damage == "gone":
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:50])
    for rank in range(2):
        assert damages(checkpoint, rank=rank, count=2) == [f"{name} is missing or truncated"]
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / manifest_of(0, 2)).unlink()
    assert damages(checkpoint) == ["manifest_*.json is missing or truncated"]


def test_a_run_without_a_whole_checkpoint_is_told_which_and_what_to_do(tmp_path: Path):
    files = RunFiles(str(tmp_path), "run")
    places = [f"{files.location}/checkpoint_{number}" for number in (1, 2)]
    for place in places:
        Path(place).mkdir(parents=True)
    told = str(no_whole_checkpoint({places[1]: "run.json is missing"}, files))
    assert f"{places[1]}: run.json is missing" in told
    assert f"Set from_checkpoint to {places[0]}, or start over (--fresh" in told
    told = str(no_whole_checkpoint(dict.fromkeys(places, "cut"), files))
    assert "Restore them from a copy, or start over (--fresh" in told


def test_checkpoints_at_a_uri_and_of_another_run_get_a_remedy_too(tmp_path: Path):
    files = RunFiles(f"file://{tmp_path}", "run")
    for number in (1, 2):
        (tmp_path / "run" / f"checkpoint_{number}").mkdir(parents=True)
    newest = {f"{tmp_path}/run/checkpoint_2": "run.json is missing"}  # as Ray Train names it
    assert f"Set from_checkpoint to file://{tmp_path}/run/checkpoint_1, or start over" in str(
        no_whole_checkpoint(newest, files)
    )
    told = str(no_whole_checkpoint(newest, files, is_own=False))
    assert "checkpoint_1, or begin with a model's weights: remove from_checkpoint" in told
    assert "--fresh" not in told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_list_that_is_written_anew_still_ranks_the_best_checkpoint_highest(tmp_path: Path):
    storage = StorageContext(str(tmp_path), "run")
    files = RunFiles(str(tmp_path), "run")
    files.write_config({"name": "run", "checkpoint": {"best_by": "x", "best_mode": "min"}})
    for step, metrics in ((1, {"x": 0.1}), (2, {}), (3, {"x": 0.2}), (4, None)):
        folder = tmp_path / "run" / f"checkpoint_{step}"
        folder.mkdir(parents=True)
        text = json.dumps({"step": step, "metrics": metrics})
        (folder / "run.json").write_text(text if metrics is not None else text[:10])
    files.write(CHECKPOINTS, b'{"checkpoint_res')
    assert mend_list(files) is not None

    async def save() -> list[int]:
        kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute=SCORE)
        manager = CheckpointManager(kept, storage)  # type: ignore[arg-type]
        folder = tmp_path / "run" / "checkpoint_5"
        folder.mkdir()
        saved = Checkpoint(str(folder), storage.storage_filesystem)
        manager.register_checkpoint(_TrainingReport(saved, {"step": 5, SCORE: -0.3}, False))
        return [each.metrics["step"] for each in manager.best_checkpoint_results]

    assert asyncio.run(save()) == [3, 1]


class LateList(LocalFileSystem):
    """Storage that does not list the newest checkpoint yet."""

    cachable = False

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        entries = super().ls(path, detail=True, **options)
        shown = [entry for entry in entries if not entry["name"].endswith("checkpoint_2")]
        return shown if detail else [entry["name"] for entry in shown]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_that_the_storage_lists_late_is_not_given_up(tmp_path: Path):
    entries = [(f"checkpoint_{step}", {"step": step}) for step in (1, 2)]
    for name, state in entries:
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / STATE).write_text(json.dumps(state))
    (tmp_path / "run" / CHECKPOINTS).write_bytes(checkpoint_list(entries))
    files = RunFiles(tmp_path.as_uri(), "run")
    storage = PyFileSystem(FSSpecHandler(LateList()))
    files._folder._file_system = storage  # type: ignore[attr-defined]
    assert "checkpoint_1" in files.names()
    assert "checkpoint_2" not in files.names()
    assert mend_list(files) is None
    shutil.rmtree(tmp_path / "run" / "checkpoint_2")
    assert "checkpoints of it are missing: checkpoint_2" in (mend_list(files) or "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("damage", ["truncated", "a folder is gone", "the newest is gone"])
def test_ray_train_starts_with_what_is_left_of_its_list(tmp_path: Path, damage: str):
    storage = StorageContext(str(tmp_path), "run")
    files = RunFiles(str(tmp_path), "run")

    async def save() -> None:
        manager = CheckpointManager(CheckpointConfig(), storage)  # type: ignore[arg-type]
        for step in (1, 2, 3):
            folder = tmp_path / "run" / f"checkpoint_{4 - step}"
            folder.mkdir(parents=True)
            state = {"step": step, "metrics": {"x": 0.5}}
            (folder / "run.json").write_text(json.dumps(state))
            saved = Checkpoint(str(folder), storage.storage_filesystem)
            metrics = {"step": step, "x": 0.5}
            manager.register_checkpoint(_TrainingReport(saved, metrics, False))

    asyncio.run(save())
    assert mend_list(files) is None
    if damage == "truncated":
        files.write(CHECKPOINTS, (files.read(CHECKPOINTS) or b"")[:200])
    else:
        shutil.rmtree(tmp_path / "run" / f"checkpoint_{1 if damage == 'the newest is gone' else 2}")
    told = mend_list(files)
    assert told is not None
    assert f"warning: {CHECKPOINTS} was rewritten, because" in told
    assert mend_list(files) is None

    left = CheckpointManager(CheckpointConfig(), storage)  # type: ignore[arg-type]
    latest = left.latest_checkpoint_result
    assert latest is not None
    wanted = 2 if damage == "the newest is gone" else 3
    assert (latest.metrics["step"], latest.metrics["x"]) == (wanted, 0.5)
    assert len(left.best_checkpoint_results) == (3 if damage == "truncated" else 2)

    for folder in (tmp_path / "run").glob("checkpoint_?"):
        shutil.rmtree(folder)
    with pytest.raises(DamagedCheckpointError, match="no checkpoint is intact:"):
        mend_list(files)
