import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from raypo.config import ConfigError
from raypo.config.base import read_yaml
from raypo.storage import folder as folder_module
from raypo.storage.folder import below, parent_and_name
from raypo.storage.rollout_table import merged, rollout_table
from raypo.storage.run_files import RunFiles
from raypo.storage.temporary import remove_abandoned


@pytest.fixture(params=["local", "remote"])
def storage(request, tmp_path):
    """A storage path, and the folder of the run `r` where its files must end up."""
    root = tmp_path / "storage"
    root.mkdir()
    return (str(root) if request.param == "local" else root.as_uri()), root / "r"


def row(**changes):
    return {
        "prompt": "1+1=",
        "response": "2",
        "label": "2",
        "data_source": "sums",
        "prompt_ids": np.array([4, 5], np.int32),
        "response_ids": np.array([6], np.int32),
        "log_probs": np.array([-0.1], np.float32),
        "ref_log_probs": np.array([-0.2], np.float32),
        "score": 1.0,
        "scores_by_source": {"function": 1.0},
        "advantage_mean": 0.5,
        "kl": 0.1,
        "finish_reason": "stop",
        "weight_version": 3,
        "prompt_index": 7,
        "sample_index": 0,
        "group_index": 2,
    } | changes


def rollouts_of(path):
    return pq.read_table(path).to_pylist(maps_as_pydicts="strict")


def test_metrics_round_trip_to_the_last_bit_with_step_first(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    values = {"x": 0.1 + 0.2, "y": np.float64(1) / 3, "z": 5e-324, "n": np.int64(7)}

    files.append_metrics(1, values)
    files.append_metrics(2, {"x": 1.5})
    files.sync()

    assert files.metrics() == [{"step": 1} | values, {"step": 2, "x": 1.5}]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert lines[0].startswith('{"step": 1, "x": 0.30000000000000004,')
    assert RunFiles(uri, "r").metrics() == files.metrics()


def test_what_is_not_finite_is_null_on_disk_and_nan_when_read(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")

    files.append_metrics(1, {"nan": math.nan, "inf": math.inf, "x": 1.0})
    files.sync()

    line = (folder / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "nan": null, "inf": null, "x": 1.0}\n'
    (read,) = files.metrics()
    assert math.isnan(read["nan"])
    assert math.isnan(read["inf"])


def test_another_process_goes_on_where_the_first_one_was_killed(storage):
    uri, folder = storage
    first = RunFiles(uri, "r")
    first.append_metrics(1, {"x": 1.0})
    first.sync()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')  # killed while it wrote

    second = RunFiles(uri, "r")
    assert [r["step"] for r in second.metrics()] == [1]
    second.append_metrics(2, {"x": 2.0})
    second.sync()

    assert (folder / "metrics.jsonl").read_text() == (
        '{"step": 1, "x": 1.0}\n{"step": 2, "x": 2.0}\n'
    )


def test_truncate_drops_what_a_resumed_run_does_again(storage):
    uri, folder = storage
    first = RunFiles(uri, "r")
    for step in (1, 2, 3):
        first.append_metrics(step, {"x": step / 2})
        first.write_rollouts(step, rollout_table([row()]))
    first.sync()

    second = RunFiles(uri, "r")
    second.truncate(after_step=1)
    second.append_metrics(2, {"x": 9.0})
    second.sync()

    assert RunFiles(uri, "r").metrics() == [{"step": 1, "x": 0.5}, {"step": 2, "x": 9.0}]
    assert [p.name for p in (folder / "rollouts").iterdir()] == ["step_00001.parquet"]


def test_a_step_is_done_once_its_metrics_are_there(storage):
    uri, _ = storage
    files = RunFiles(uri, "r")
    files.write_rollouts(0, rollout_table([row()]), held_out=True)
    assert (files.last_step(), files.rollout_steps()) == (0, [])
    assert files.rollout_steps(held_out=True) == [0]  # before the first update
    for step in (1, 2):
        files.write_rollouts(step, rollout_table([row()]))
        files.append_metrics(step, {})
    files.write_rollouts(3, rollout_table([row()]))  # and then the run was stopped
    files.write_rollouts(3, rollout_table([row()]), held_out=True)
    files.sync()
    reader = RunFiles(uri, "r")
    assert (reader.last_step(), reader.rollout_steps()) == (2, [1, 2])
    assert reader.rollout_steps(held_out=True) == [0]


def test_only_the_columns_that_are_wanted_are_read(storage):
    files = RunFiles(storage[0], "r")
    files.write_rollouts(1, rollout_table([row()]))
    assert files.rollouts(1, columns=("score", "group_index")) == [{"score": 1.0, "group_index": 2}]


def test_rollouts_have_the_columns_and_types_of_the_design(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")

    files.write_rollouts(12, rollout_table([row()]))
    files.sync()

    path = folder / "rollouts" / "step_00012.parquet"
    assert {f.name: str(f.type).replace(f" ('{f.name}')", "") for f in pq.read_schema(path)} == {
        "prompt": "string",
        "response": "string",
        "label": "string",
        "data_source": "string",
        "row": "map<string, string>",
        "prompt_ids": "list<element: int32>",
        "response_ids": "list<element: int32>",
        "log_probs": "list<element: float>",
        "ref_log_probs": "list<element: float>",
        "score": "double",
        "scores_by_source": "map<string, double>",
        "reward_texts": "map<string, string>",
        "response_mask": "list<element: bool>",
        "turn_rewards": "list<element: float>",
        "turn_index": "list<element: int32>",
        "episode": "struct<score: double, num_turns: int64, environment_s: double, error: string, "
        "metrics: map<string, double ('metrics')>, tool_uses: list<element: struct<name: string, "
        "seconds: double, error: string, turn: int64>>>",
        "advantages": "list<element: float>",
        "advantage_mean": "double",
        "kl": "double",
        "finish_reason": "string",
        "weight_version": "int64",
        "weight_versions": "list<element: int64>",
        "prompt_index": "int64",
        "sample_index": "int64",
        "group_index": "int64",
        "row_index": "int64",
    }


def test_what_a_rollout_does_not_have_is_null_and_labels_that_are_no_text_are_json(tmp_path):
    files = RunFiles(str(tmp_path), "r")
    bare = {k: v for k, v in row().items() if k not in ("ref_log_probs", "kl", "label")}
    labels = [{"answer": 2, "of": np.array([1, 2])}, ["a", "ü"], 2.5, "text", None]

    rows = [bare, row(score=math.nan), *(row(label=label) for label in labels)]
    files.write_rollouts(1, rollout_table(rows))

    read = rollouts_of(tmp_path / "r" / "rollouts" / "step_00001.parquet")
    assert (read[0]["ref_log_probs"], read[0]["kl"], read[0]["label"]) == (None, None, None)
    assert read[1]["score"] is None
    assert [r["label"] for r in read[2:]] == [
        '{"answer": 2, "of": [1, 2]}',
        '["a", "ü"]',
        "2.5",
        "text",
        None,
    ]


def test_text_that_has_no_utf_8_is_written_with_a_replacement(tmp_path):
    files = RunFiles(str(tmp_path), "r")
    use = {"name": "\ud83d", "seconds": 0.1, "error": "there is no tool \ud83d", "turn": 0}
    episode = {"num_turns": 1, "error": "\ud800", "metrics": {"\ud800": 1.0}, "tool_uses": [use]}
    files.write_rollouts(1, rollout_table([row(response="a\ud800b", episode=episode)]))

    (read,) = rollouts_of(tmp_path / "r" / "rollouts" / "step_00001.parquet")
    assert read["response"] == "a?b"
    assert read["episode"]["error"] == "?"
    assert read["episode"]["tool_uses"][0] == use | {"name": "?", "error": "there is no tool ?"}


def test_what_workers_have_made_is_one_table_in_order_whatever_parts_their_rewards_had():
    first = [row(group_index=1, **{"reward/b": 1.0}), row(group_index=0, sample_index=1)]
    second = [row(group_index=0, **{"reward/a": 0.5}), row(group_index=1, sample_index=1)]
    shares = [rollout_table(rows) for rows in (first, second, [])]
    table = merged(shares)
    places = list(
        zip(*(table[name].to_pylist() for name in ("group_index", "sample_index")), strict=True)
    )
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert table.equals(rollout_table([second[0], first[1], first[0], second[1]]))
    assert table["reward/a"].to_pylist() == [0.5, None, None, None]


def test_a_row_with_other_columns_is_refused(tmp_path):
    files = RunFiles(str(tmp_path), "r")
    bad = row(reward=1.0)
    del bad["response"]

    with pytest.raises(
        ValueError,
        match=r"rollout row 1 has unknown columns \['reward'\], missing columns \['response'\]",
    ):
        files.write_rollouts(1, rollout_table([row(), bad]))


def test_config_and_summary_round_trip(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    assert (files.config(), files.summary(), files.exists()) == (None, None, False)

    files.write_config({"name": "r", "learner": {"policy_lr": 1e-6}, "data": ("a", "b")})
    files.write_summary({"status": "finished", "kl/ref_mean": {"first": 0.0, "last": math.nan}})
    files.sync()

    other = RunFiles(uri, "r")
    assert other.exists()
    assert other.config() == {"name": "r", "learner": {"policy_lr": 1e-6}, "data": ["a", "b"]}
    assert other.summary() == {"status": "finished", "kl/ref_mean": {"first": 0.0, "last": None}}
    assert yaml.safe_load((folder / "config.yaml").read_text())["learner"]["policy_lr"] == 1e-6
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_sync_copies_what_others_wrote_and_only_what_changed(tmp_path):
    target = tmp_path / "r"
    files = RunFiles(tmp_path.as_uri(), "r")
    for folder, name in (
        (files.folder / "policy", "model.safetensors"),
        (files.logs_dir, "worker.log"),
    ):
        folder.mkdir()
        (folder / name).write_text("one")
    files.sync()
    (target / "policy" / "model.safetensors").write_text("untouched")
    (files.logs_dir / "worker.log").write_text("one, two")
    (files.logs_dir / ".partial-1-x").write_text("being written")
    files.sync()

    assert (target / "policy" / "model.safetensors").read_text() == "untouched"
    assert [p.name for p in (target / "logs").iterdir()] == ["worker.log"]
    assert (target / "logs" / "worker.log").read_text() == "one, two"


def test_a_log_has_the_lines_of_all_attempts(storage):
    for attempt in ("first", "second"):
        files = RunFiles(storage[0], "r")
        with files.log_path("worker_0.log").open("a") as log:
            log.write(f"{attempt}\n")
        files.sync()
    assert (storage[1] / "logs" / "worker_0.log").read_text() == "first\nsecond\n"


def test_a_remote_run_is_seen_by_others_only_after_a_sync(tmp_path):
    files = RunFiles(tmp_path.as_uri(), "r")
    files.append_metrics(1, {"x": 1.0})

    assert RunFiles(tmp_path.as_uri(), "r").metrics() == []
    files.sync()
    assert RunFiles(tmp_path.as_uri(), "r").metrics() == [{"step": 1, "x": 1.0}]


def test_a_file_that_another_process_replaced_is_read_anew(storage):
    """A driver wrote `failed`; `fit` is called again, and its workers write `finished`."""
    driver = RunFiles(storage[0], "r")
    driver.write_summary({"status": "failed"})
    assert driver.summary() == {"status": "failed"}
    driver.sync()
    worker = RunFiles(storage[0], "r")
    worker.truncate(after_step=0)
    assert driver.summary() is None
    worker.write_summary({"status": "finished"})
    worker.sync()
    assert driver.summary() == {"status": "finished"}
    driver.sync()
    assert worker.summary() == {"status": "finished"}
    driver.write_summary({"status": "interrupted"})
    assert driver.summary() == {"status": "interrupted"}


def test_the_stage_goes_with_its_owner(tmp_path):
    files = RunFiles(tmp_path.as_uri(), "r")
    stage = files.folder
    assert stage.is_dir()
    del files
    assert not stage.exists()


def test_a_folder_may_be_named_from_within(tmp_path, monkeypatch):
    (tmp_path / "runs" / "one" / "policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "runs" / "one" / "policy")
    for location, name in (("..", "one"), (".", "policy"), ("../../one/", "one")):
        files = RunFiles.at(location)
        assert (files.name, files.folder.name) == (name, name)


def test_an_unknown_storage_is_refused():
    with pytest.raises(ConfigError, match=r"^storage_path \(nowhere://x\): this storage cannot"):
        RunFiles("nowhere://x", "r")


def test_remove_takes_a_run_away_and_a_missing_one_is_no_error(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    files.remove()
    files.write_config({"name": "r"})
    files.write("rollouts/step_00001.parquet", b"")
    files.append_metrics(1, {"x": 1.0})
    files.sync()
    (folder / "checkpoint_000000").mkdir()  # Ray Train's
    assert folder.exists()

    files.remove()

    assert [path.name for path in folder.iterdir()] == ["config.yaml"], "a new start replaces it"
    files.append_metrics(1, {"x": 2.0})
    files.sync()
    assert RunFiles(uri, "r").metrics() == [{"step": 1, "x": 2.0}]


def test_remove_keeps_what_was_given_in_python_and_the_new_config_names(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    files.write_config({"name": "r"})
    kept = ["given_models/model.policy-2", "given_rows/data.prompts-2.jsonl"]
    for name in (*kept, "given_models/model.policy-1", "given_rows/data.prompts-1.jsonl"):
        files.write(f"{name}/config.json" if "models" in name else name, b"{}")
    files.sync()
    prompts = [{"path": f"{files.location}/{kept[1]}", "weight": 2.0}]

    files.remove({"model": {"policy": f"{files.location}/{kept[0]}"}, "data": {"prompts": prompts}})

    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {"config.yaml", f"{kept[0]}/config.json", kept[1]}


def test_remove_of_a_run_that_died_before_its_config_works(storage):
    uri, folder = storage
    (folder / "logs").mkdir(parents=True)
    (folder / ".validate_storage_marker").touch()

    RunFiles(uri, "r").remove()

    assert not folder.exists()


@pytest.mark.parametrize("name", ["policy/model.safetensors", "metrics.jsonl", "config.yaml"])
def test_remove_takes_nothing_by_its_name_alone(storage, name):
    uri, folder = storage
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text("name: another")
    (folder / "logs").mkdir()

    with pytest.raises(ConfigError, match=f"it holds {name.split('/')[0]}, so it is not removed"):
        RunFiles(uri, "r").remove()

    assert (folder / name).exists()


@pytest.mark.parametrize(("kind", "other"), [("run", "sweep"), ("sweep", "run")])
def test_remove_tells_a_run_from_a_sweep_of_the_same_name(storage, kind, other):
    files = RunFiles(storage[0], "r")
    files.write_config({"name": "r"} | ({"base_config": {}} if kind == "sweep" else {}))
    files.sync()
    with pytest.raises(ConfigError, match=f"is not the folder of such a {other}"):
        files.remove(kind=other)
    files.write("summary.json", b"{}")
    files.sync()
    files.remove(kind=kind)
    assert files.names() == ["config.yaml"]


def test_a_text_that_looks_like_a_reference_stays_a_text(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    values = {"name": "r", "prompts": ["${amount}", {"a": "${dir}/b"}], "lr": 1e-6}
    files.write_config(values)
    files.sync()
    assert files.config() == values
    assert read_yaml(folder, []) == values | {"storage_path": str(folder.parent)}


def test_the_options_of_a_uri_stay_behind_the_names(tmp_path):
    place = "s3://bucket/runs?endpoint_override=localhost:9000"
    run = "s3://bucket/runs/a/checkpoint_1?endpoint_override=localhost:9000"
    assert below(place, "a", "checkpoint_1") == run
    assert parent_and_name(run) == (below(place, "a"), "checkpoint_1")
    assert below("/runs/what?/", "a") == "/runs/what?/a"
    uri = f"{tmp_path.as_uri()}?region=here"
    files = RunFiles(uri, "a")
    files.write_config({"name": "a"})
    files.sync()
    assert files.location == f"{tmp_path.as_uri()}/a?region=here"
    assert RunFiles.at(files.location).name == "a"


def test_a_second_driver_is_refused_and_the_lock_outlives_remove(tmp_path):
    mine, other = RunFiles(str(tmp_path), "r"), RunFiles(str(tmp_path), "r")
    mine.write_config({"name": "r"})
    with mine.lock():
        mine.remove()
        with pytest.raises(ConfigError) as error, other.lock():
            pass
    assert str(error.value) == (
        f"name (r): another process is running in {tmp_path / 'r'}. "
        "Wait until it has ended, stop it, or choose another name."
    )
    with other.lock():
        pass


def test_runs_of_other_names_are_not_locked_and_a_uri_is_never(tmp_path):
    a, b = (RunFiles(str(tmp_path), name) for name in "ab")
    with a.lock(), b.lock():
        assert a.is_running()
        assert b.is_running()
    at_uri = RunFiles(tmp_path.as_uri(), "a")
    with at_uri.lock(), RunFiles(tmp_path.as_uri(), "a").lock():
        assert at_uri.is_running() is None  # it cannot be seen there


def test_a_reader_never_sees_half_a_summary(tmp_path):
    files = RunFiles(str(tmp_path), "r")
    files.write_summary({"n": 0, "filler": "x" * 100_000})
    done = threading.Event()

    def write() -> None:
        for number in range(50):
            files.write_summary({"n": number, "filler": "x" * 100_000})
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not done.is_set():
        summary = RunFiles(str(tmp_path), "r").summary()
        assert summary is not None
        assert len(summary["filler"]) == 100_000
    thread.join()
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["summary.json"]


def test_a_relative_path_is_the_drivers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = RunFiles("runs", "r")
    monkeypatch.chdir("/")
    assert files.folder == tmp_path / "runs" / "r"


def test_a_checkpoint_is_staged_where_it_will_lie(storage):
    """Of a large model it is hundreds of GB, more than a temporary folder has."""
    files = RunFiles(storage[0], "r")
    stage = files.new_stage()
    (stage / "shard").write_text("half of it")
    assert stage.parent == files.folder
    files.sync()
    assert files.is_local == (storage[1] / stage.name).exists()
    assert files.new_stage() != stage
    files.clear_stages()  # of an attempt that died
    assert not list(files.folder.iterdir())


def test_a_run_that_has_ended_leaves_no_local_copies_of_files_at_a_uri(storage):
    files = RunFiles(storage[0], "r")
    files.append_metrics(1, {"x": 1.0})
    files.sync()
    stage = files.new_stage()
    files.close()
    assert stage.is_dir(), "Ray Train may be uploading it"
    stage.rmdir()
    files.close()
    assert files.folder.exists() == files.is_local
    assert files.metrics() == [{"step": 1, "x": 1.0}]
    files.append_metrics(2, {"x": 2.0})  # as by a trainer whose `fit` is called again
    files.sync()
    assert len(RunFiles(storage[0], "r").metrics()) == 2


STAGING = """
import os, sys
from raypo.storage.run_files import RunFiles
files = RunFiles(sys.argv[1], "r")
print(files.new_stage().parent, flush=True)
sys.stdin.read()
os._exit(1)  # as at ray.kill: no exit handlers
"""


def test_local_copies_of_a_killed_process_go_with_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", STAGING, tmp_path.as_uri()]
    pipe = subprocess.PIPE
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as owner:
        assert owner.stdout
        assert owner.stdin
        left = Path(owner.stdout.readline().strip())
        of_another_host = left.with_name(left.name.replace("raypo-run-", "raypo-run-x"))
        of_others = [
            of_another_host,
            left.with_name(f"x{left.name}"),
            left.with_name("raypo-run-1"),
        ]
        for each in of_others:
            each.mkdir()
        remove_abandoned.cache_clear()
        RunFiles(tmp_path.as_uri(), "r")
        assert left.is_dir(), "its owner lives"
        owner.stdin.close()
        owner.wait()
    assert left.is_dir()
    remove_abandoned.cache_clear()
    RunFiles(tmp_path.as_uri(), "r")
    assert not left.exists()
    assert all(each.is_dir() for each in of_others)


@pytest.mark.parametrize("root", ["/runs", "/elsewhere/../runs", "file:///tmp/raypo-unused"])
def test_a_file_in_the_folder_would_be_removed_unless_it_was_given_in_python(root):
    files = RunFiles(root, "r")
    place = files.location
    assert files.would_remove(place)
    assert files.would_remove(f"{place}/policy")
    assert not files.would_remove(f"{place}-2/policy")
    assert not files.would_remove(f"{place}/given_models/model.policy-1")
    assert not files.would_remove("Qwen/Qwen3-0.6B")


def test_a_file_that_a_link_or_a_uri_leads_to_would_be_removed_too(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    for root in (tmp_path / "link", tmp_path.as_uri()):
        assert RunFiles(str(root), "r").would_remove(f"{tmp_path}/r/policy")


def test_links_out_of_a_runs_folder_are_not_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    secret, table = outside / "secret", outside / "step_00001.parquet"
    secret.write_text("name: secret\n")
    pq.write_table(rollout_table([row()]), table)
    files = RunFiles(str(tmp_path), "r")
    files.append_metrics(1, {"x": 1.0})
    for name in ("config.yaml", "summary.json", "inputs.json", "metrics.jsonl"):
        (files.folder / name).unlink(missing_ok=True)
        (files.folder / name).symlink_to(secret)
    (files.folder / "rollouts").symlink_to(outside)
    (files.folder / "timeline").symlink_to(outside)
    uses: list[Callable[[], Any]] = [
        files.config,
        files.summary,
        files.inputs,
        files.metrics,
        files.timeline,
        lambda: files.rollouts(1),
        lambda: files.append_metrics(2, {"x": 1.0}),
        lambda: files.append_timeline("worker", {}),
        lambda: files.write_rollouts(2, rollout_table([row()])),
        lambda: files.write_summary({}),
        lambda: files._folder.delete("rollouts/step_00001.parquet"),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="a symbolic link leads out of the run's folder, to"):
            use()
    (files.folder / "metrics.jsonl").unlink()
    files._folder.remove()
    assert secret.read_text() == "name: secret\n"
    assert table.exists()


def test_a_link_within_a_runs_folder_and_to_it_is_followed(tmp_path: Path):
    files = RunFiles(str(tmp_path), "r")
    files.append_metrics(1, {"x": 1.0})
    (tmp_path / "r" / "metrics.jsonl").rename(tmp_path / "r" / "older.jsonl")
    (tmp_path / "r" / "metrics.jsonl").symlink_to("older.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "r")
    assert RunFiles(str(tmp_path), "link").metrics() == [{"step": 1, "x": 1.0}]


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(54321)
    try:
        yield
    finally:
        os.seteuid(user)


def open_to_all(folder: Path) -> None:
    """Let other users pass through pytest's folders, which only their owner may enter."""
    while folder != Path(tempfile.gettempdir()):
        folder.chmod(0o711)
        folder = folder.parent


def test_a_place_for_a_run_is_tried_and_nothing_is_left_there(storage):
    uri, folder = storage
    files = RunFiles(uri, "r")
    files.check_writable()
    assert files.names() == []
    files.append_metrics(1, {})
    (files.folder / "logs").mkdir()
    files.sync()
    before = sorted(folder.rglob("*"))
    files.check_writable()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("below", ["", "/folder"])
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_storage_path_that_is_a_file_is_refused(tmp_path, scheme, below):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=r"storage_path \(.*/file.*\): .* Give a folder or URI"):
        RunFiles(f"{scheme}{path}{below}", "r").check_writable()


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("theirs", ["", "r"])
def test_a_storage_path_of_another_user_is_refused(tmp_path, scheme, theirs):
    open_to_all(tmp_path)
    storage = tmp_path / "storage"
    (storage / theirs).mkdir(parents=True, mode=0o755)
    if theirs:
        storage.chmod(0o777)
        (storage / theirs).chmod(0o555)
    else:
        storage.chmod(0o555)
    files = RunFiles(f"{scheme}{storage}", "r")
    with as_ordinary_user(), pytest.raises(ConfigError, match=r"storage_path .*ermission denied"):
        files.check_writable()


def test_a_folder_of_a_run_that_another_user_has_written_is_refused(tmp_path):
    open_to_all(tmp_path)
    storage = tmp_path / "storage"
    (storage / "r" / "logs").mkdir(parents=True)
    for folder, mode in ((storage, 0o777), (storage / "r", 0o777), (storage / "r/logs", 0o555)):
        folder.chmod(mode)
    with as_ordinary_user(), pytest.raises(ConfigError, match=r"/r/logs: Permission denied"):
        RunFiles(str(storage), "r").check_writable()


def test_a_model_that_is_renamed_meanwhile_does_not_disturb_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint is written in a thread, while the main thread copies the files of each step."""
    files = RunFiles(tmp_path.as_uri(), "r")
    files.append_metrics(1, {"kl": 0.5})
    part = files.folder / "policy.new" / "model.safetensors"
    part.parent.mkdir()
    part.touch()
    stamp = folder_module._stamp

    def renamed_before(path: Path) -> tuple[int, int]:
        if path == part:
            part.parent.rename(files.folder / "policy")
        return stamp(path)

    monkeypatch.setattr(folder_module, "_stamp", renamed_before)
    files.sync(models=False)
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["metrics.jsonl"]
