"""The rows of docs/scale.md that take long to compute."""

from scripts.scale_table import rows
from tests.unit.plan.test_scale import PAGE


def test_the_rows_of_512_gpus_are_what_the_plan_says():
    lines = PAGE.read_text().splitlines()
    assert all(line in lines for line in rows((512,)))
