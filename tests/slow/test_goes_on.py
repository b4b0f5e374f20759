"""Runs that go on: further than they were to, or as another run, with the numbers of one run."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow.parquet import read_table
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer
from raypo.storage.checkpoints import checkpoint_state, find_checkpoint
from tests.integration.task import kill_train_workers_after, numbers, read_metrics

pytestmark = pytest.mark.usefixtures("local_ray")


def run(task: Path, name: str, **overrides: object) -> tuple[list[dict], dict]:
    config = PPOConfig.load(task, overrides={"name": name, **overrides})
    result = PPOTrainer(config).fit()
    return read_metrics(task.parent / "runs" / name), result.return_value or {}


def test_another_run_begins_with_the_state_of_a_checkpoint_and_keeps_its_best(
    first: SimpleNamespace, task: Path
):
    checkpoints = [find_checkpoint(str(path)) for path in first.folder.glob("checkpoint_2*")]
    (start,) = [path for path in checkpoints if checkpoint_state(path)["step"] == 2]
    watched = {"checkpoint.best_by": "eval/score_mean", "checkpoint.keep": 1}
    rows, _ = run(task, "branch", from_checkpoint=start, **watched)
    assert numbers(rows) == numbers(first.metrics[1:])

    branch = task.parent / "runs" / "branch"
    best = json.loads((branch / "best" / "best.json").read_text())
    assert best == {"metric": "eval/score_mean", "step": 4, "value": rows[-1]["eval/score_mean"]}
    assert json.loads((branch / "summary.json").read_text())["best"] == best
    weights = [each.read_bytes() for each in branch.glob("*/policy/*.safetensors")]
    assert weights == [(first.folder / "policy" / "model.safetensors").read_bytes()]
    assert checkpoint_state(find_checkpoint(str(branch / "best")))["step"] == 4


def test_a_run_that_was_stopped_and_lengthened_is_the_one_that_never_was(
    first: SimpleNamespace, task: Path
):
    rules = {"stop.metric": "rollout/score_mean", "stop.at": -1.0}
    rows, ended = run(task, "longer", num_steps=3, **rules)
    summary = json.loads((task.parent / "runs" / "longer" / "summary.json").read_text())
    assert len(rows) == 1
    assert ended == {"status": "finished", "step": 1}
    assert "at least -1 (stop.at)" in summary["stopped"]

    again, _ = run(task, "longer", num_steps=3, **rules)
    assert again == rows  # it is done by its rules

    rows, ended = run(task, "longer", **{"stop.after_s": 0.1})
    assert ended == {"status": "interrupted", "step": 1}  # no step is begun after its time
    assert len(rows) == 1

    rows, ended = run(task, "longer")
    assert ended == {"status": "finished", "step": 4}
    assert numbers(rows) == numbers(first.metrics)


def test_a_deployed_judge_gives_the_same_grades_wherever_it_runs_and_after_a_resume(task: Path):
    judge = {
        "path": str(task.parent / "policy"),
        "template": "{label}? {response} {criterion}",
        "criteria": {"right": {"text": "A", "weight": 3}, "kind": "B"},
        "grades": {"YES": 1.0, "NO": 0.0},
        "max_model_len": 128,
        "sampling": {"max_tokens": 4, "structured_outputs": {"choice": ["YES", "NO"]}},
    }
    keys = {"reward.function": None, "reward.judge": judge}
    whole, _ = run(task, "judged", **keys)
    apart, _ = run(task, "apart", **keys, **{"placement.mode": {"judge": "dedicated"}})
    run(task, "judged-halves", **keys | {"num_steps": 2})
    halves, _ = run(task, "judged-halves", **keys)
    for rows in (whole, apart, halves):
        for row in rows:
            assert row.pop("reward/judge_s") > 0.0
            row.pop("eval/reward/judge_s", None)
            row.pop("eval/initial_reward/judge_s", None)
    assert numbers(apart) == numbers(halves) == numbers(whole)
    assert all(row["reward/judge_ungraded"] == 0.0 for row in whole)
    folder = task.parent / "runs" / "judged" / "rollouts"
    for row in read_table(folder / "step_00001.parquet").to_pylist(maps_as_pydicts="strict"):
        texts = row["reward_texts"]
        grades = [float(texts[f"judge/{name}"] == "YES") for name in ("right", "kind")]
        assert row["score"] == (3 * grades[0] + grades[1]) / 4


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_a_curriculum_goes_on_with_the_prompts_of_the_run_that_was_never_stopped(
    task: Path, mode: str
):
    """The learner's worker is killed after step 3, one after a checkpoint.

    A lengthened run would not do: its last step samples nothing ahead.
    """
    keys = {"data.curriculum": {"pass_score": 0.2, "memory": 0.5}, "num_steps": 6}
    if mode != "sync":
        keys |= {"rollout.mode": mode, "placement.mode": {"engine": "dedicated"}}
    whole, _ = run(task, f"whole-{mode}", **keys)
    config = PPOConfig.load(task, overrides={"name": f"killed-{mode}", **keys})

    folder = task.parent / "runs" / config.name
    killer = threading.Thread(target=kill_train_workers_after, args=(folder, 3), daemon=True)
    killer.start()
    once = RunConfig(failure_config=FailureConfig(max_failures=1))
    result = PPOTrainer(config, run_config=once).fit()
    killer.join(timeout=10)
    rows = read_metrics(folder)
    assert result.return_value == {"status": "finished", "step": 6}
    accounts = {f"rollout/samples_{name}" for name in ("asked", "asked_again", "carried")}
    one, other = (
        [{key: value for key, value in row.items() if key not in accounts} for row in numbers(each)]
        for each in (rows, whole)
    )
    assert one == other
    assert 0 < rows[0]["curriculum/seen_fraction"] < rows[-1]["curriculum/seen_fraction"]
    folders = [task.parent / "runs" / f"{name}-{mode}" for name in ("whole", "killed")]
    weights = [(each / "policy" / "model.safetensors").read_bytes() for each in folders]
    assert weights[0] == weights[1]
