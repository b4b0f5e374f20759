"""The rows of docs/scale.md and docs/long-responses.md that take long to compute."""

from scripts import length_table
from scripts.scale_table import rows
from tests.unit.plan import test_longest
from tests.unit.plan.test_scale import PAGE


def test_the_rows_of_512_gpus_are_what_the_plan_says():
    lines = PAGE.read_text().splitlines()
    assert all(line in lines for line in rows((512,)))


def test_the_lengths_of_all_models_are_what_the_plan_says():
    lines = test_longest.PAGE.read_text().splitlines()
    assert all(line in lines for line in (*length_table.HEAD, *length_table.rows()))
