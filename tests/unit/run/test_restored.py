"""A run goes on from its newest whole checkpoint; uploads to a URI are waited for."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
import torch
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.train import Checkpoint
from ray.train.v2._internal.execution.storage import StorageContext

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.learner.export import Export, NamedWeights
from raypo.run import checkpoint_writer, run_checkpoints
from raypo.run.checkpoint_writer import CheckpointWriter, Staged
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.setup import Runtime
from raypo.storage import retries
from raypo.storage.checkpoints import DamagedCheckpointError
from raypo.storage.retries import StorageError
from raypo.storage.run_files import RunFiles
from tests.unit.learner.plain import on_workers

STEPS = (1, 2, 3)


class Console:
    """The run's messages, of every worker."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.message = self.messages.append

    def stop_requested(self) -> bool:
        return False


class Counter:
    """A learner whose state is a number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, 0

    def state_files(self) -> dict[str, dict[str, Any]]:
        return {f"learner_{self.rank}.pt": {"value": torch.tensor(self.value)}}

    def restore(self, directory: Path) -> None:
        self.value = int(torch.load(directory / f"learner_{self.rank % 2}.pt")["value"])


def checkpoints_of(
    folder: Path,
    workers: Workers,
    learner: Any = None,
    *,
    name: str = "run",
    begun: Path | None = None,
) -> Checkpoints:
    config = PPOConfig.parse(
        {
            "name": name,
            "from_checkpoint": begun and str(begun),
            "model": {"policy": "p"},
            "data": {"prompts": "d"},
            "checkpoint": {"every": 1},
        }
    )
    runtime, files = Runtime(name, str(folder), str(folder)), RunFiles(str(folder), name)
    run: Run[Any] = Run(config, runtime, workers, files, Console())  # type: ignore[arg-type]
    one: Any = learner or Counter(workers.rank)
    return Checkpoints(run, Records(run), one, workers, {})


def saved_by(workers: Workers, folder: Path) -> None:
    learner = Counter(workers.rank)
    checkpoints = checkpoints_of(folder, workers, learner)
    for step in STEPS:
        learner.value = 10 * step + workers.rank
        # In its own folder each, as with a URI, and in one, as on a shared disk.
        checkpoints.records.check_stop_rules(step, {})
        assert checkpoints.records.is_checkpoint_due(step)
        staged = checkpoints.save(step, {}, {"mine": step})
        assert staged.write is not None
        staged.write()
        place = folder / "run" / f"checkpoint_{step}"
        place.mkdir(exist_ok=True)
        for path in staged.folder.iterdir():
            path.rename(place / path.name)
        if workers.rank == 0:
            checkpoints.run.files.append_metrics(step, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of three steps of two workers, as Ray Train knows them."""
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)
    monkeypatch.setattr(run_checkpoints, "log_to_file", lambda *_, **__: None)  # one process
    on_workers(2, lambda workers: saved_by(workers, tmp_path))
    reported = [
        SimpleNamespace(
            checkpoint=Checkpoint(str(tmp_path / "run" / f"checkpoint_{step}")),
            metrics={"step": step},
        )
        for step in (2, 3, 1)  # by score
    ]
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: reported[1].checkpoint)
    monkeypatch.setattr(
        ray.train, "get_all_reported_checkpoints", lambda consistency_mode: reported
    )
    return tmp_path


def damage(folder: Path, step: int, name: str) -> None:
    path = folder / "run" / f"checkpoint_{step}" / name
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damaged", "goes_on_from"),
    [
        ([], 3),
        ([(3, "learner_1.pt")], 2),
        ([(3, "learner_1.pt"), (2, "learner_0.pt")], 1),
        ([(3, "manifest_1_of_2.json"), (2, "run.json")], 1),
        ([(2, "run.json")], 3),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_damaged_checkpoints_are_skipped_for_the_one_before(
    folder: Path, damaged: list[tuple[int, str]], goes_on_from: int, count: int
):
    for step, name in damaged:
        damage(folder, step, name)

    def restored(workers: Workers) -> tuple[int, int, list[str]]:
        learner = Counter(workers.rank)
        checkpoints = checkpoints_of(folder, workers, learner)
        state = checkpoints.restore()
        return state["mine"], learner.value, checkpoints.run.tell.messages  # type: ignore

    for rank, (mine, value, messages) in enumerate(on_workers(count, restored)):
        assert mine == goes_on_from
        assert value == 10 * goes_on_from + rank % 2
        skipped = [text for text in messages if "is damaged and skipped" in text]
        wanted = [each for each in damaged if each[0] > goes_on_from]
        assert len(skipped) == len(wanted)
        for (step, name), text in zip(wanted, skipped, strict=True):
            assert f"checkpoint_{step} is damaged and skipped: {name}" in text
        others = f"was written by 2 workers and is resumed with {count}"
        assert any(others in text for text in messages) == (count != 2)
    files = RunFiles(str(folder), "run")
    assert files.last_step() == goes_on_from, "steps that are repeated have no line any more"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(folder: Path):
    for step in STEPS:
        damage(folder, step, "run.json")
    with pytest.raises(DamagedCheckpointError, match="no checkpoint is intact:") as caught:
        checkpoints_of(folder, Workers()).restore()
    assert all(f"checkpoint_{step}: run.json has" in str(caught.value) for step in STEPS)
    assert RunFiles(str(folder), "run").last_step() == 3, "nothing is lost"


def test_a_damaged_checkpoint_of_another_run_is_told_with_what_that_run_has_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    damage(folder, 3, "run.json")
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    checkpoints = checkpoints_of(folder, Workers(), name="other", begun=folder / "run/checkpoint_3")
    with pytest.raises(DamagedCheckpointError, match="checkpoint_3: run") as caught:
        checkpoints.restore()
    assert f"Set from_checkpoint to {folder / 'run/checkpoint_2'}, or begin" in str(caught.value)


def test_each_step_is_saved_once_a_node_is_about_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checkpoints = checkpoints_of(tmp_path, Workers())
    monkeypatch.setattr(
        checkpoints.run.config.checkpoint.__class__, "is_due", lambda *_, **__: False
    )
    for leaving in (None, object()):
        monkeypatch.setattr(ray.train, "get_preemption_info", lambda leaving=leaving: leaving)
        assert checkpoints.records.is_checkpoint_due(1) == (leaving is not None)
    assert "about to be preempted" in checkpoints.run.tell.messages[-1]  # type: ignore


class Slow(LocalFileSystem):
    """Storage that refuses some writes, and lets the others wait."""

    cachable = False

    def __init__(self, failures: int, go_on: threading.Event) -> None:
        super().__init__(auto_mkdir=True)
        self.failures, self.go_on = failures, go_on
        self.busy = min(failures, 1)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        if self.busy and path.endswith("checkpoint_3"):
            self.busy -= 1
            raise OSError(5, "the storage does not answer")
        super().makedirs(path, exist_ok=exist_ok)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        if "w" in mode and "policy_0" in path:
            self.go_on.wait(10)
            if self.failures:
                self.failures -= 1
                raise OSError(5, "the storage does not answer")
        return super()._open(path, mode, block_size=block_size, **kwargs)


def uploading(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
    go_on: threading.Event,
    *,
    attempts: int = 1,
) -> tuple[CheckpointWriter, threading.Thread, list[Checkpoint | BaseException], list[str]]:
    """Upload of a checkpoint and a model in a thread, as Ray Train does it."""
    monkeypatch.setattr(retries, "WAITS_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(checkpoint_writer, "TOLD_AFTER_S", 0.05)
    monkeypatch.setattr(checkpoint_writer, "RETRIED_WITHIN_S", 0.5)
    system = PyFileSystem(FSSpecHandler(Slow(failures, go_on)))
    storage = StorageContext(str(folder / "far"), "run", storage_filesystem=system)
    context = SimpleNamespace(get_storage=lambda: storage)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    staged, files = folder / "staged", RunFiles(f"file://{folder}/far", "run")
    staged.mkdir()
    (staged / "policy_0.pt").write_text("state")
    (files.folder / "policy").mkdir()
    (files.folder / "policy" / "model.safetensors").write_text("weights")
    messages: list[str] = []
    ended: list[Checkpoint | BaseException] = []
    writer = CheckpointWriter(files, messages.append)
    upload = writer.begin(3, Staged(staged, None))

    def work() -> None:
        for _ in range(attempts):
            try:
                ended.append(upload(Checkpoint.from_directory(str(staged)), "checkpoint_3"))
            except StorageError as error:
                ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return writer, thread, ended, messages


def test_a_run_waits_for_a_slow_upload_that_fails_three_times_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    go_on = threading.Event()
    mine, thread, ended, messages = uploading(tmp_path, monkeypatch, 3, go_on)
    threading.Timer(0.2, go_on.set).start()
    mine.wait()
    thread.join()
    (uploaded,) = ended
    assert isinstance(uploaded, Checkpoint)
    far = tmp_path / "far" / "run"
    assert uploaded.path == str(far / "checkpoint_3")
    assert (far / "checkpoint_3" / "policy_0.pt").read_text() == "state"
    assert (far / "policy" / "model.safetensors").read_text() == "weights"
    waited = f"waiting until the checkpoint of step 3 is stored in file://{far}"
    assert messages.count(waited) >= 2
    assert sum("does not answer); next attempt" in text for text in messages) == 4
    mine.wait()  # nothing is under way any more


@pytest.mark.parametrize("failures", [4, 99])
def test_an_upload_that_ray_train_retries_ends_as_its_last_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
):
    go_on = threading.Event()
    go_on.set()
    mine, thread, ended, _ = uploading(tmp_path, monkeypatch, failures, go_on, attempts=2)
    with (
        nullcontext()
        if failures == 4
        else pytest.raises(StorageError, match=r"policy_0.pt to .* failed 4 times")
    ):
        mine.wait()
    thread.join()
    kinds = [type(each) for each in ended]
    assert kinds == [StorageError, Checkpoint if failures == 4 else StorageError]


def test_a_snapshot_is_written_as_it_was_although_the_learner_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)
    weight = torch.ones(3)

    def write(folder: Path, weights: NamedWeights) -> None:
        folder.mkdir()
        torch.save(dict(weights), folder / "weights.pt")

    class Learner(Counter):
        def state_files(self) -> dict[str, dict[str, Any]]:
            return {"learner_0.pt": {"value": torch.tensor(7), "weight": weight}}

    checkpoints = checkpoints_of(tmp_path, Workers(), Learner(0))
    checkpoints.exports = {"policy": Export(lambda: iter([("w", weight)]), write, weight.nbytes)}
    staged = checkpoints.save(1, {}, {})
    assert staged.write is not None
    weight.zero_()
    staged.write()
    saved = torch.load(staged.folder / "learner_0.pt")
    model = torch.load(tmp_path / "run" / "policy" / "weights.pt")
    assert torch.equal(saved["weight"], torch.ones(3))
    assert torch.equal(model["w"], torch.ones(3))


@pytest.mark.parametrize(("free", "is_beside"), [(2.0, True), (1.9, False)])
def test_a_snapshot_that_all_workers_of_a_node_have_no_memory_for_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, is_beside: bool
):
    def decided(workers: Workers) -> tuple[bool, list[str]]:
        checkpoints = checkpoints_of(tmp_path, workers)
        fits = checkpoints._fits_beside({"x": {"y": torch.zeros(250_000_000 // 4).expand(2, -1)}})
        return fits, checkpoints.run.tell.messages  # type: ignore

    monkeypatch.setattr(run_checkpoints, "available_memory", lambda: int(free * 1e9))
    for fits, messages in on_workers(2, decided):
        assert fits == is_beside
        told = "within their step: a snapshot takes 1 GB of 1.9 GB of free RAM"
        assert any(told in text for text in messages) != is_beside
