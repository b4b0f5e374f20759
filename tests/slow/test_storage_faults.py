"""Whole runs on storage that is full: a disk, for a while and for good, and Ray's object store."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.train import TrainingFailedError

from raypo import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from raypo.cluster.connect import connect
from raypo.config import ClusterSection
from tests.integration.pipeline import sft_values, write_examples
from tests.integration.task import numbers, read_metrics, wait_for_steps
from tests.small_disk import small_disk

STORE_BYTES = 100 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", size="64m") as path:
        yield path


def train(values: dict[str, Any], storage_path: Path) -> list[dict[str, Any]]:
    config = SFTConfig.parse(values | {"name": "run", "storage_path": str(storage_path)})
    SFTTrainer(config).fit()
    return read_metrics(storage_path / "run")


def fill(path: Path) -> None:
    with (path / "filler").open("wb") as file:
        try:
            while True:
                file.write(b"x" * 4096)
                file.flush()
        except OSError:
            return


@pytest.mark.usefixtures("local_ray")
def test_a_disk_that_is_full_for_a_while_and_then_for_good(disk: Path, tmp_path: Path):
    write_examples(tmp_path)
    values = sft_values(tmp_path, lr_schedule="constant")
    values |= {"eval": {}, "checkpoint": {"every": 1, "keep": 2}, "num_steps": 6}
    plain = train(values, tmp_path / "plain")

    def full(*, then_free: bool) -> threading.Thread:
        def work() -> None:
            wait_for_steps(disk / "run", 2)
            fill(disk)
            if then_free:
                time.sleep(7.0)  # the second attempt at a write comes after 5 s, the third after 15
                (disk / "filler").unlink()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    beside = full(then_free=True)
    assert numbers(train(values, disk)) == numbers(plain)
    beside.join()
    assert not (disk / "filler").exists()

    shutil.rmtree(disk / "run")
    beside = full(then_free=False)
    with pytest.raises(TrainingFailedError, match="Free some space or bring the storage back"):
        train(values, disk)
    beside.join()
    (disk / "filler").unlink()
    assert numbers(train(values, disk)) == numbers(plain)


@pytest.fixture
def small_store() -> Iterator[None]:
    """A Ray of its own with a small object store."""
    before = ray.is_initialized()
    ray.shutdown()
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        namespace="raypo",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    if before:
        connect(ClusterSection())


def test_a_full_object_store_changes_no_figure(small_store: None, task: Path):
    """Ray writes what does not fit to a disk, and pushes, batches and results with it."""

    def run(name: str) -> list[dict[str, Any]]:
        PPOTrainer(PPOConfig.load(task, {"name": name, "num_steps": 3})).fit()
        return numbers(read_metrics(task.parent / "runs" / name))

    expected = run("roomy-store")
    held = [ray.put(np.full(8 << 20, number, np.uint8)) for number in range(16)]
    used = [ray.get(reference) for reference in held[-10:]]  # pinned, so not spilled
    assert sum(map(len, used)) > 0.75 * STORE_BYTES
    assert run("full-store") == expected
    assert [int(array[0]) for array in used] == [*range(6, 16)]
