"""The judge's words become grades; an integration test asks a real endpoint."""

from pathlib import Path

import pytest

from examples.smollm2_judge.reward import parse
from raypo import PPOConfig


@pytest.mark.parametrize(
    ("text", "grade"),
    [("1", 0.0), (" 5.", 1.0), ("Grade: 3", 0.5), ("4/5", 0.75), ("4 because of 2 faults", 0.75)],
)
def test_the_first_number_is_the_grade(text, grade):
    assert parse(text) == grade


@pytest.mark.parametrize("text", ["", "very friendly", "0", "6", "15", "-", "-3", "1.5"])
def test_what_is_no_grade_fails_the_sample(text):
    assert parse(text) is None


def test_the_run_file_goes_on_when_a_few_grades_are_missing():
    folder = Path(__file__).parents[2] / "examples" / "smollm2_judge"
    config = PPOConfig.load(folder / "ppo.yaml")
    assert config.model.reward is None
    assert 0 < config.reward.max_failed_fraction < 1
