"""Each planted sickness is named in time, and healthy runs are quiet: what real runs measured."""

from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from raypo.health.rules import RULES, findings
from raypo.storage.run_files import RunFiles
from tests.health_runs import HEALTHY_STEPS, SICK, recorded
from tests.recorded_run import write_recorded

RULE_BY_NAME = {rule.name: rule for rule in RULES}
runs = cache(recorded)


def rows_of(name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if v is not None} for row in runs()[name]["rows"]]


@pytest.mark.parametrize("name", SICK)
def test_a_planted_sickness_is_named_within_the_steps_of_its_definition(name: str):
    sick, config = SICK[name], runs()[name]["config"]
    steps = {finding.rule: finding.step for finding in findings(rows_of(name), config)}
    assert sick.rule in steps, f"named: {steps}"
    is_of_evaluations = sick.rule in ("reward_gamed", "policy_dies")
    every = sick.options["eval"]["every"] if is_of_evaluations else 1
    assert sick.onset <= steps[sick.rule] < sick.onset + RULE_BY_NAME[sick.rule].within * every


@pytest.mark.parametrize("name", [name for name in SICK if SICK[name].onset > 1])
def test_a_sickness_is_not_named_before_it_begins(name: str):
    before = list(takewhile(lambda row: row["step"] < SICK[name].onset, rows_of(name)))
    rules = {finding.rule for finding in findings(before, runs()[name]["config"])}
    assert SICK[name].rule not in rules


def test_a_healthy_run_gives_no_alarm():
    rows = rows_of("grpo-1")
    assert len(rows) == HEALTHY_STEPS
    assert findings(rows, runs()["grpo-1"]["config"]) == []


@pytest.mark.parametrize("name", ["quickstart-sft", "quickstart-reward-model", "quickstart"])
def test_the_quickstart_gives_no_alarm(name: str, tmp_path: Path):
    files = RunFiles.at(str(write_recorded(tmp_path, name)))
    assert len(files.metrics()) >= 15
    assert findings(files.metrics(), files.config()) == []


def test_each_rule_has_a_definition_and_a_name_of_its_own():
    assert all(rule.definition for rule in RULES)
    assert len(RULE_BY_NAME) == len(RULES)


def doctor(folder: Path, *options: str) -> Any:
    from typer.testing import CliRunner

    from raypo.cli import app

    return CliRunner().invoke(app, ["doctor", str(folder), *options])


def write(folder: Path, name: str) -> Path:
    files = RunFiles(str(folder), name)
    files.write_config(runs()[name]["config"] | {"name": name})
    for row in rows_of(name):
        files.append_metrics(int(row.pop("step")), row)
    return folder / name


def test_doctor_names_the_sickness_of_a_run_from_its_folder(tmp_path: Path):
    result = doctor(write(tmp_path, "constant"))
    assert result.exit_code == 1
    assert "constant_reward: step 3: every sample of 3 steps scored 0" in result.output
    assert "raypo try-reward" in result.output
    assert "1 alarm" in result.output


def test_doctor_is_content_with_a_healthy_run_and_says_what_bounds_it(tmp_path: Path):
    import json

    folder = write(tmp_path, "grpo-1")
    result = doctor(folder)
    assert result.exit_code == 0, result.output
    assert f"none of {len(RULES)} rules matches." in result.output
    (speed,) = [r for r in json.loads(doctor(folder, "--json").stdout) if r["check"] == "speed"]
    assert " bound, " in speed["found"]


def test_a_folder_is_no_run_file(tmp_path: Path):
    result = doctor(write(tmp_path, "constant"), "learner.num_workers=2")
    assert result.exit_code == 2
    assert "is the folder of a run" in result.output
    (tmp_path / "empty").mkdir()
    assert doctor(tmp_path / "empty").exit_code == 2
