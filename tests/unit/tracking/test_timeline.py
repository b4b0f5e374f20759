import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raypo.cli import app
from raypo.storage.run_files import RunFiles
from raypo.tracking.trace import trace, trace_call, write_spans


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    files = RunFiles(str(tmp_path), "r")
    write_spans(RunFiles(str(tmp_path), "earlier"), 0, 0, [])  # calls that other tests have noted
    trace_call("raypo:r:engine:0", "generate", 100.1, 100.9)
    write_spans(files, 0, 1, [("time/generate_s", 100.0, 101.0), ("time/update_s", 101.0, 103.5)])
    write_spans(files, 1, 1, [("time/generate_s", 100.0, 101.5)])
    return files


def test_phases_and_calls_have_tracks_of_their_own(files: RunFiles):
    events = trace(files)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [
        (tracks[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["step"])
        for e in events
        if e["ph"] == "X"
    ]
    assert sorted(spans) == [
        ("raypo:r:engine:0", "generate", 100_100_000, 800_000, 1),
        ("worker 0", "generate", 100_000_000, 1_000_000, 1),
        ("worker 0", "update", 101_000_000, 2_500_000, 1),
        ("worker 1", "generate", 100_000_000, 1_500_000, 1),
    ]


def test_rollouts_that_were_collected_beside_the_update_have_a_track_of_their_own(files: RunFiles):
    beside = [("perf/engine_idle_s", 103.0, 103.5), ("time/generate_s", 103.5, 104.0)]
    write_spans(files, 0, 2, [("time/update_s", 103.0, 104.0)], beside)
    assert [line["spans"] for line in files.timeline() if line["step"] == 2] == [
        [
            ["worker 0", "update", 103.0, 104.0],
            ["worker 0 rollouts", "engine idle", 103.0, 103.5],
            ["worker 0 rollouts", "generate", 103.5, 104.0],
        ]
    ]


def test_a_line_that_was_cut_short_is_left_out(files: RunFiles):
    with (files.folder / "timeline" / "worker_0.jsonl").open("a") as file:
        file.write('{"step": 2, "spa')
    assert [line["step"] for line in files.timeline()] == [1, 1]


def test_the_command_writes_a_file_that_a_viewer_opens(files: RunFiles):
    done = CliRunner().invoke(app, ["timeline", str(files.folder)])
    assert done.exit_code == 0
    assert len(json.loads((files.folder / "timeline.json").read_text())["traceEvents"]) == 8
    elsewhere = files.folder / "not" / "there" / "trace.json"
    done = CliRunner().invoke(app, ["timeline", str(files.folder), "--out", str(elsewhere)])
    assert done.exit_code == 0
    assert elsewhere.is_file()


def test_without_a_timeline_it_is_told(tmp_path: Path):
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert done.exit_code == 2
    assert "no timeline" in done.output
