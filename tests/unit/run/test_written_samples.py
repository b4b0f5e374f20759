"""Files that are written while a step goes on are there before its line of metrics is."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.metrics.clock import Clock
from raypo.rollout.sharding import to_experience
from raypo.run.records import Records
from raypo.run.rollout_metrics import rollout_rows, sample_row
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from tests.unit.learner.plain import group, on_workers


@pytest.fixture
def run(tmp_path: Path) -> Run[PPOConfig]:
    runtime = Runtime("run", str(tmp_path), str(tmp_path))
    config = PPOConfig.parse({"name": "run", "model": {"policy": "p"}, "data": {"prompts": "d"}})
    return Run(config, runtime, Workers(), RunFiles(str(tmp_path), "run"), MonitorClient(None))


def report(records: Records, step: int) -> None:
    records.report(step, {}, Clock(), None, to_ray=False)


def test_a_step_has_its_line_when_its_files_are_written_and_not_before(run, monkeypatch):
    written: list[int] = []
    at_the_line: list[int] = []

    def slow(number: int) -> list[dict[str, Any]]:
        time.sleep(0.05 * (3 - number))  # the first takes longest
        written.append(number)
        return []

    append = run.files.append_metrics

    def appended(step: int, metrics: dict[str, float]) -> None:
        at_the_line.extend(written)
        append(step, metrics)

    monkeypatch.setattr(run.files, "append_metrics", appended)
    records = Records(run)
    for number in range(3):
        records.write_samples(1, partial(slow, number))
    assert len(written) < 3, "it does not wait"
    report(records, 1)
    assert at_the_line == [0, 1, 2]
    assert run.files.last_step() == 1


def test_a_file_that_cannot_be_written_ends_the_step_without_a_line(run, monkeypatch):
    def write(*args: Any, **named: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(run.files, "write_rollouts", write)
    records = Records(run)
    records.write_samples(1, list)
    with pytest.raises(OSError, match="No space left"):
        report(records, 1)
    assert run.files.last_step() == 0


def test_rollouts_and_held_out_samples_are_written_so(run):
    dealt = list(group(0))
    experience = to_experience(dealt)
    zeros = experience.rollout_log_probs * 0.0
    experience = experience.with_(advantages=zeros, returns=zeros, old_log_probs=zeros)
    records = Records(run)
    records.write_samples(1, partial(rollout_rows, dealt, experience))
    records.write_samples(1, partial(list, map(sample_row, dealt)), held_out=True)
    report(records, 1)
    for held_out in (False, True):
        written = run.files.rollouts(1, held_out=held_out)
        ids = [row["response_ids"] for row in written]
        assert ids == [each.response_ids.tolist() for each in dealt]


def test_all_workers_gather_in_their_threads_while_they_do_something_else(run):
    def work(workers: Workers) -> None:
        records = Records(Run(run.config, run.runtime, workers, run.files, run.tell))
        for step in range(1, 4):
            rows = partial(list, map(sample_row, group(workers.rank)))
            records.write_samples(step, rows, held_out=True)
            workers.gather("meanwhile")
        report(records, 3)

    on_workers(2, work)
    each = [tuple(sample_row(sample)["response_ids"]) for n in range(2) for sample in group(n)]
    for step in range(1, 4):
        written = [tuple(row["response_ids"]) for row in run.files.rollouts(step, held_out=True)]
        assert sorted(written) == sorted(each)
