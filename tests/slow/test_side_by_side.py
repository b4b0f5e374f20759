"""A run and a sweep of two drivers, at the same time on one Ray."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.util import list_named_actors, placement_group_table

from raypo import SFTTrainer
from tests.integration.pipeline import sft_values, write_examples
from tests.integration.task import numbers, own_ray, raypo, read_metrics, wait_for_steps


def own_names() -> set[str]:
    """Named actors and placement groups of raypo."""
    named: list[Any] = list_named_actors(all_namespaces=True)
    groups = placement_group_table().values()
    names = [each["name"] for each in named]
    names += [each["name"] for each in groups if each["state"] != "REMOVED"]
    return {name for name in names if name.startswith("raypo:")}


def test_they_give_the_numbers_that_they_give_alone_and_leave_nothing(
    first: SimpleNamespace, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_examples(tmp_path)
    base = tmp_path / "sft.yaml"
    base.write_text(yaml.safe_dump(sft_values(tmp_path)))
    sweep = {
        "name": "rates",
        "base": str(base),
        "storage_path": str(tmp_path / "runs"),
        "space": {"learner.lr": {"grid": [5e-3, 1e-4]}},
        "searcher": "grid",
        "metric": "eval/score_mean",
    }
    (tmp_path / "rates.yaml").write_text(yaml.safe_dump(sweep))
    before = own_names()
    monkeypatch.setenv("RAY_ADDRESS", own_ray())
    run = raypo("train", task, "name=beside", "num_steps=1000")
    beside = task.parent / "runs" / "beside"
    wait_for_steps(beside, 1)
    trials = raypo("sweep", tmp_path / "rates.yaml")
    out, error = trials.communicate(timeout=900)
    assert trials.returncode == 0, out + error
    assert run.poll() is None, "they did not run at the same time"
    run.send_signal(signal.SIGINT)
    out, error = run.communicate(timeout=300)
    assert run.returncode == 130, out + error
    assert numbers(read_metrics(beside))[:4] == numbers(first.metrics)
    deadline = time.monotonic() + 30
    while own_names() != before and time.monotonic() < deadline:
        time.sleep(0.5)
    assert own_names() == before

    SFTTrainer(base).fit()
    trial = tmp_path / "runs" / "rates" / "trials" / "rates-00000"
    assert numbers(read_metrics(trial)) == numbers(read_metrics(tmp_path / "runs" / "sft"))
