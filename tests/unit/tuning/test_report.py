from pathlib import Path
from typing import Any

import pytest

from raypo.cli.monitor import page_source as live_page_source
from raypo.config.sweep_config import SweepConfig
from raypo.report.page import Chart, Table, Words
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import Goal
from raypo.tuning.record import TrialRecord, write_trials
from raypo.tuning.sweep_folder import recorded_config
from raypo.tuning.sweep_page import load_sweep, sweep_page
from tests.recorded_run import rollout

BASE = """
name: quick
num_steps: 40
model: {policy: tiny, reward: judge}
data: {prompts: prompts.jsonl}
eval: {prompts: held_out.jsonl, function: "raypo.rewards.verifiers:exact_match"}
"""
SCORE, JUDGE, KL = "eval/score_mean", "eval/reward_model_mean", "kl/ref_response_mean"


def trial(number: int, coef: float, score: float, judge: float, kl: float) -> TrialRecord:
    metrics = {SCORE: score, JUDGE: judge, KL: kl}
    point = {"ppo.kl.coef": coef}
    return TrialRecord(f"s-{number:05d}", point, "finished", 40, metrics, 50.0, 100.0)


GAMED = [
    trial(0, 0.001, 0.29, 5.0, 12.0),
    trial(1, 0.1, 0.82, 4.0, 2.0),
    trial(2, 3.0, 0.5, 2.0, 0.1),
]


@pytest.fixture
def folder(tmp_path: Path) -> RunFiles:
    (tmp_path / "base.yaml").write_text(BASE)
    space = {"ppo.kl.coef": {"loguniform": [1e-3, 3.0]}}
    values = {"name": "s", "base": str(tmp_path / "base.yaml"), "space": space}
    sweep = SweepConfig.parse(values | {"num_samples": 3, "scheduler": "asha"})
    files = RunFiles(str(tmp_path), "s")
    files.write_config(recorded_config(sweep, sweep.base_config()))
    return files


def answer(
    files: RunFiles, trial: TrialRecord, scores: dict[int, float], judge: dict[int, float]
) -> None:
    """Save a trial's answers to twenty held-out prompts: by step, their mean scores.

    Around the mean the prompts differ by 0.1, in another order at each step and in each trial.
    """
    run = RunFiles(f"{files.location}/trials", trial.name)
    run.write_config({"name": trial.name, "model": {"reward": [{"path": "judge", "weight": 1.0}]}})
    start = {"eval/initial_score_mean": scores[0], "eval/initial_reward_model_mean": judge[0]}
    for step in range(1, max(scores) + 1):
        run.append_metrics(step, {"time/step_s": 1.0} | (start if step == 1 else {}))
    for step, score in scores.items():
        rows = [rollout(step, group, 0) for group in range(20)]
        for row in rows:
            place = (
                row["group_index"] * (1, 3, 7, 9, 11, 13, 17)[(3 * step + int(trial.name[-5:])) % 7]
            )
            tremble = 0.1 if place % 20 < 10 else -0.1
            row |= {"score": score + tremble, "scores_by_source": {"model": judge[step] + tremble}}
        run.write_rollouts(step, rollout_table(rows), held_out=True)


def page_of(files: RunFiles, trials: list[TrialRecord]) -> tuple[Any, dict[str, list[Any]]]:
    write_trials(files, trials, Goal((SCORE,), (1.0,)))
    sweep = load_sweep(files)
    assert sweep is not None
    page = sweep_page(sweep)
    return page, {section.title: section.blocks for section in page.sections}


def words(blocks: list[Any]) -> str:
    return " ".join(block.text for block in blocks if isinstance(block, Words))


def test_the_page_names_the_best_trial_and_draws_scores_by_value(folder: RunFiles):
    for each in GAMED:
        answer(folder, each, {0: 0.4, 40: each.metrics[SCORE]}, {0: 1.0, 40: each.metrics[JUDGE]})
    page, sections = page_of(folder, GAMED)
    result = words(sections["Result"])
    assert "ppo.kl.coef=0.1 is best: held-out score 0.820, next ppo.kl.coef=3 with 0.5" in result
    assert "(95 % interval of the difference +0.2" in result
    assert "20 prompts better, 0 worse, of 20). Both scores are from step 40." in result
    charts = {b.title: b.figure for b in sections["What the values did"] if isinstance(b, Chart)}
    judged = charts["held-out score by ppo.kl.coef"]
    assert judged["data"][0]["x"] == [0.001, 0.1, 3.0]
    assert judged["data"][0]["y"] == [0.29, 0.82, 0.5]
    assert judged["layout"]["xaxis"]["type"] == "log"
    assert "ppo.kl.coef=0.001 games the reward model" in page.html()


def test_a_trial_that_was_stopped_while_it_gamed_is_named(folder: RunFiles):
    """At step 10 its reward model's score is below that of the winner's step 40."""
    stopped = trial(3, 0.003, 0.35, 3.0, 4.0)
    stopped.status, stopped.step = "stopped", 10
    for each in (GAMED[1], stopped):
        scores, judge = {0: 0.48, each.step: each.metrics[SCORE]}, {0: 1.0, each.step: 3.0}
        answer(folder, each, scores, judge)
    _, sections = page_of(folder, [*GAMED[1:], stopped])
    why = words(sections["What the values did"])
    assert "ppo.kl.coef=0.003 games the reward model: in s-00003 its score went from 1 to 3" in why
    assert "while the held-out score fell from 0.480 to 0.350" in why
    assert "by step 10 (95 % interval of the change -0." in why


def test_a_held_out_score_that_fell_by_chance_is_no_gaming(folder: RunFiles):
    unlucky = trial(3, 0.003, 0.45, 3.0, 4.0)
    answer(folder, unlucky, {0: 0.48, 40: 0.45}, {0: 1.0, 40: 3.0})
    _, sections = page_of(folder, [*GAMED, unlucky])
    assert "game" not in words(sections["What the values did"])


def test_a_lead_that_may_be_chance_makes_nobody_the_best(folder: RunFiles):
    close = [trial(0, 0.1, 0.80, 4.0, 2.0), trial(1, 0.3, 0.81, 5.0, 2.0)]
    for each in close:
        answer(folder, each, {0: 0.4, 40: each.metrics[SCORE]}, {0: 1.0, 40: each.metrics[JUDGE]})
    _, sections = page_of(folder, close)
    result = words(sections["Result"])
    assert "Which is best is not decided: ppo.kl.coef=0.3 has the highest held-out score" in result
    assert "is best:" not in result


def test_a_trial_that_was_stopped_early_is_not_the_best(folder: RunFiles):
    stopped = trial(3, 1.0, 0.9, 1.0, 0.1)
    stopped.status, stopped.step = "stopped", 10
    _, sections = page_of(folder, [*GAMED, stopped])
    assert words(sections["Result"]).startswith("ppo.kl.coef=0.1 is first: held-out score 0.82 at")
    assert "the difference may be due to chance" in words(sections["Result"])
    (table,) = [block for block in sections["Trials"] if isinstance(block, Table)]
    assert [row[1] for row in table.rows] == ["s-00001", "s-00002", "s-00000", "s-00003"]
    (chart,) = sections["Score against KL"]
    assert chart.figure["data"][0]["x"] == [0.1, 2.0]  # not the stopped one's, little as it is


def test_trials_are_ranked_and_an_infeasible_one_is_called_so(folder: RunFiles):
    values = folder.config() or {}
    folder.write_config({**values, "constraint": [f"{KL} <= 10"]})
    failed = trial(3, 0.5, 0.4, 1.0, 0.5)
    failed.status, failed.metrics = "failed", {}
    _, sections = page_of(folder, [*GAMED, failed])
    (table,) = [block for block in sections["Trials"] if isinstance(block, Table)]
    assert [row[1:3] for row in table.rows] == [
        ["s-00001", "finished"],
        ["s-00002", "finished"],
        ["s-00000", "infeasible"],
        ["s-00003", "failed"],
    ]


def test_the_live_page_of_a_sweep_follows_its_trials(folder: RunFiles):
    make_page, version = live_page_source([folder.location])
    before = version()
    assert "trial 0 of 3" in make_page().html(with_plotly=False)
    RunFiles(f"{folder.location}/trials", "s-00000").append_metrics(1, {SCORE: 0.5})
    assert version() != before
