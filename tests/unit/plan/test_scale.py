"""docs/scale.md says what `raypo plan` computes."""

from pathlib import Path

from scripts.scale_table import HEAD, rows

PAGE = Path(__file__).parents[3] / "docs" / "scale.md"


def test_the_table_of_the_page_is_what_the_plan_says():
    lines = PAGE.read_text().splitlines()
    for line in (*HEAD, *rows((8, 64))):  # those of 512 GPUs by a slow test
        assert line in lines
