"""Files that are written while a step goes on are there before its line of metrics is."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.collectives import Workers
from raypo.learner.roles import Roles
from raypo.metrics.clock import Clock
from raypo.rollout.sharding import to_experience
from raypo.run.background_writer import BackgroundWriter
from raypo.run.online_run import OnlineRun
from raypo.run.ppo_run import PPORun
from raypo.run.rollout_metrics import sample_row
from raypo.run.run import Run
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import Sinks
from tests.unit.learner.plain import group, on_workers


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """As much of a run as `report` reads."""
    return SimpleNamespace(
        files=RunFiles(str(tmp_path), "run"),
        workers=Workers(),
        tell=SimpleNamespace(step=lambda row: None),
        speed=lambda metrics, step_s: {},
        spans_beside=list,
        _sinks=Sinks([]),
        _initial={},
        _writer=None,
        _step_started=0.0,
    )


def report(run: Any, step: int) -> None:
    Run.report(run, step, {}, Clock(), None, to_ray=False)


def test_a_step_has_its_line_when_its_files_are_written_and_not_before(run, monkeypatch):
    written: list[int] = []
    at_the_line: list[int] = []

    def slow(number: int) -> Any:
        def write(workers: Workers) -> None:
            time.sleep(0.05 * (3 - number))  # the first takes longest
            written.append(number)

        return write

    append = run.files.append_metrics

    def appended(step: int, metrics: dict[str, float]) -> None:
        at_the_line.extend(written)
        append(step, metrics)

    monkeypatch.setattr(run.files, "append_metrics", appended)
    for number in range(3):
        Run.write_later(run, slow(number))
    assert len(written) < 3, "it does not wait"
    report(run, 1)
    assert at_the_line == [0, 1, 2]
    assert run.files.last_step() == 1


def test_a_file_that_cannot_be_written_ends_the_step_without_a_line(run):
    def write(workers: Workers) -> None:
        raise OSError("No space left on device")

    Run.write_later(run, write)
    with pytest.raises(OSError, match="No space left"):
        report(run, 1)
    assert run.files.last_step() == 0


def test_rollouts_and_held_out_samples_are_written_so(run):
    run.roles = Roles.shared(Workers())
    run.write_later = partial(Run.write_later, run)
    run._write_rollouts = partial(OnlineRun._write_rollouts, run)
    dealt = list(group(0))
    experience = to_experience(dealt)
    zeros = experience.rollout_log_probs * 0.0
    experience = experience.with_(advantages=zeros, returns=zeros, old_log_probs=zeros)
    PPORun.save_rollouts(run, 1, dealt, experience)
    rows = partial(list, map(sample_row, dealt))
    Run.write_later(run, partial(run._write_rollouts, 1, rows, held_out=True))
    report(run, 1)
    for held_out in (False, True):
        written = run.files.rollouts(1, held_out=held_out)
        ids = [row["response_ids"] for row in written]
        assert ids == [each.rollout.response_ids.tolist() for each in dealt]


def test_all_workers_gather_in_their_threads_while_they_do_something_else():
    def work(workers: Workers) -> list[Any]:
        seen: list[Any] = []
        writer = BackgroundWriter(workers.beside())
        for number in range(3):
            writer.submit(lambda group, n=number: seen.append(group.gather((n, group.rank))))
            workers.gather("meanwhile")
        writer.wait()
        writer.close()
        return seen

    for seen in on_workers(2, work):
        assert seen == [[(n, 0), (n, 1)] for n in range(3)]
