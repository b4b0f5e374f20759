from pathlib import Path
from typing import Any

import pytest
import yaml

from raypo.config import ConfigError, PPOConfig
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import SCORED_STEP
from raypo.tuning.outcome import write_outcome
from raypo.tuning.record import TrialRecord
from raypo.tuning.sweep_folder import check_sweep_folder, is_complete, recorded_config

SCORE = "eval/score_mean"
BASE = """
name: quick
model: {policy: tiny}
data: {prompts: prompts.jsonl}
ppo: {preset: grpo}
rollout: {prompts_per_step: 8, samples_per_prompt: 4}
eval: {prompts: held_out.jsonl}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def sweep_of(base: Path, **changes: Any) -> SweepConfig:
    space = {"ppo.kl.coef": {"loguniform": [1e-3, 1.0]}, "ppo.clip_low": {"choice": [0.1, 0.2]}}
    values = {"name": "s", "base": str(base), "space": space, "storage_path": str(base.parent)}
    return SweepConfig.parse(values | {"overrides": {"num_steps": 9}} | changes)


def trials() -> list[TrialRecord]:
    points = [{"ppo.kl.coef": 0.1, "ppo.clip_low": 0.1}, {"ppo.kl.coef": 0.5, "ppo.clip_low": 0.2}]
    return [
        TrialRecord("s-00000", points[0], "finished", 9, {SCORE: 0.4}, 30.0, 60.0),
        TrialRecord("s-00001", points[1], "finished", 9, {SCORE: 0.7}, 31.0, 62.0),
        TrialRecord("s-00002", points[1], "failed", 2, {}, 5.0, 10.0, "ValueError: no"),
    ]


def outcome_in(base: Path, records: list[TrialRecord], **changes: Any) -> Any:
    files = RunFiles(str(base.parent), "s")
    sweep = sweep_of(base, **changes)
    values = sweep.base_values()
    base.unlink()  # the file may change or go while the sweep runs
    return write_outcome(files, sweep, records, base=values, status="finished", wall_s=100.0), files


def test_best_yaml_is_the_base_as_written_with_the_best_point(base: Path):
    outcome, files = outcome_in(base, trials())
    assert outcome.best.name == "s-00001"
    path = files.folder / "best.yaml"
    written = yaml.safe_load(path.read_text())
    assert written["ppo"] == {"preset": "grpo", "kl": {"coef": 0.5}, "clip_low": 0.2}
    best = PPOConfig.load(path)
    assert (best.name, best.num_steps, best.ppo.kl.coef) == ("s-best", 9, 0.5)
    assert best.ppo.advantage == "grpo"


def test_the_best_of_a_stopped_trial_ends_where_it_had_its_score(base: Path):
    records = trials()
    records[0].status = "failed"
    records[1].status, records[1].step = "stopped", 7
    records[1].metrics[SCORED_STEP] = 6
    _, files = outcome_in(base, records, overrides={"num_steps": 9, "eval.every": 3})
    best = files.folder / "best.yaml"
    assert PPOConfig.load(best).num_steps == 6
    assert "stopped after step 7; its score is of step 6" in best.read_text()


def test_the_best_is_of_those_that_came_furthest(base: Path):
    """Everywhere that a rank is: the outcome, the table and best.yaml."""
    import pandas as pd

    records = trials()
    records[1].status, records[1].step = "stopped", 7
    outcome, files = outcome_in(base, records)
    assert outcome.best.name == "s-00000"
    table = pd.read_parquet(files.folder / "trials.parquet")
    assert table["name"].tolist() == ["s-00000", "s-00001", "s-00002"]
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["scored_step"].tolist()[:2] == [9, 7]
    assert table[SCORE].tolist()[:2] == [0.4, 0.7]
    assert table["space/ppo.kl.coef"].tolist() == [0.1, 0.5, 0.5]
    assert PPOConfig.load(files.folder / "best.yaml").ppo.kl.coef == 0.1


def test_a_best_trial_that_breaks_the_constraint_is_told(base: Path):
    outcome = outcome_in(base, trials(), constraint="kl/ref_response_mean <= 10")[0]
    line = "no trial satisfies all constraints; this one violates kl/ref_response_mean <= 10"
    assert line in outcome.lines


def test_a_sweep_without_any_score_has_failed(base: Path):
    outcome, files = outcome_in(base, trials()[2:])
    assert (outcome.status, outcome.best) == ("failed", None)
    assert "s-00002 failed: ValueError: no" in outcome.lines
    assert not (files.folder / "best.yaml").exists()
    assert not is_complete(sweep_of(base), files)


def test_a_finished_sweep_is_done_until_more_trials_are_wanted(base: Path):
    _, files = outcome_in(base, trials()[:2], num_samples=2)
    assert is_complete(sweep_of(base, num_samples=2), files)
    assert not is_complete(sweep_of(base, num_samples=3), files)


def test_a_sweep_with_a_failed_trial_is_not_done_and_the_trial_is_not_the_best(base: Path):
    records = trials()
    records[1].status, records[1].error = "failed", "OSError: gone"
    outcome, files = outcome_in(base, records, num_samples=3)
    assert outcome.best.name == "s-00000"
    assert not is_complete(sweep_of(base, num_samples=3), files)


def test_a_folder_of_another_sweep_is_refused_with_the_difference(base: Path):
    sweep, files = sweep_of(base), RunFiles(str(base.parent), "s")
    check_sweep_folder(sweep, sweep.base_config(), files)
    files.write_config(recorded_config(sweep, sweep.base_config()))
    more = sweep_of(base, num_samples=99, max_concurrent=1)
    check_sweep_folder(more, more.base_config(), files)
    for changed, words in (
        (sweep_of(base, seed=3), "seed: 0 -> 3"),
        (sweep_of(base, overrides={"num_steps": 10}), "num_steps: 9 -> 10"),
    ):
        with pytest.raises(ConfigError, match="holds another sweep") as error:
            check_sweep_folder(changed, changed.base_config(), files)
        assert words in str(error.value)


@pytest.mark.parametrize(("start", "is_told"), [(0.9, True), (0.5, False)])
def test_it_is_said_that_no_trial_is_better_than_the_start(base: Path, start: float, is_told: bool):
    records = trials()
    for record in records[:2]:
        record.metrics |= {"eval/initial_score_mean": start}
    outcome, _ = outcome_in(base, records)
    assert outcome.best.name == "s-00001"
    told = "No trial is better than the start: before the first update held-out score was 0.9."
    assert (told in outcome.lines) == is_told
