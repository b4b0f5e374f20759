import io
from pathlib import Path

from typer.testing import CliRunner

from raypo.cli import app
from raypo.report.terminal import chosen, print_samples
from raypo.storage.run_files import RunFiles
from tests.recorded_run import rollout, write_run


def test_samples_of_the_last_step_in_the_order_that_is_asked_for(tmp_path: Path):
    run = write_run(tmp_path, steps=3)
    done = CliRunner().invoke(app, ["show", str(run), "--best", "-n", "1"])
    assert done.exit_code == 0
    assert "recorded, step 3: 9 samples, mean score 0.530; best first" in done.output
    assert "score 1.03  advantage +0.10  KL 0.20  3 tokens" in done.output
    assert "label: a" in done.output
    assert done.output.count("score 1.03") == 1


def test_a_step_that_was_never_finished_is_not_shown(tmp_path: Path):
    run = write_run(tmp_path, steps=3)
    RunFiles.at(str(run)).write_rollouts(4, [rollout(4, 0, 0)])  # its update was stopped
    done = CliRunner().invoke(app, ["show", str(run)])
    assert "recorded, step 3: 9 samples" in done.output


def test_orders():
    rows = [rollout(1, group, sample) for group in range(3) for sample in range(3)]
    rows[4]["score"] = None
    rows[5]["response_ids"] = [1] * 9
    assert [row["score"] for row in chosen(rows, "worst", 3)] == [0.01, 0.01, 0.01]
    assert chosen(rows, "best", 9)[-1]["score"] is None
    assert chosen(rows, "longest", 1) == [rows[5]]
    assert chosen(rows, None, 3) == [rows[0], rows[3], rows[6]]
    assert len(chosen(rows, None, 50)) == 9


def test_text_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path):
    files = RunFiles(str(tmp_path), "r")
    files.write_rollouts(1, [rollout(1, 0, 0) | {"response": "[bold]x[/nothing]"}])
    stream = io.StringIO()
    print_samples(files, 1, None, 1, stream)
    assert "[bold]x[/nothing]" in stream.getvalue()


def test_wrong_input_is_told(tmp_path: Path):
    run = str(write_run(tmp_path, steps=2))
    for arguments, words in (
        ([run, "--step", "9"], "--step (9)"),
        ([run, "--best", "--worst"], "one order at a time"),
        ([str(tmp_path / "nothing")], "no rollouts are there"),
    ):
        done = CliRunner().invoke(app, ["show", *arguments])
        assert done.exit_code == 2
        assert words in done.output
