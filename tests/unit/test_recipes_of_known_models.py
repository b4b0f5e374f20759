"""Run files of examples/recipes: they are valid, fit their cluster, and say what the plan says."""

import re
from pathlib import Path

import pytest

from examples.recipes.prepare import BOXED, prepared
from raypo.config import load_run_config
from scripts.recipe_plans import recipes, with_plan

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


@pytest.mark.parametrize("path", recipes(), ids=lambda path: path.stem)
def test_a_recipe_says_what_its_plan_says(path: Path):
    text = path.read_text()
    assert "NOT YET RUN" in text
    assert text == with_plan(text), "Write it anew: make docs"
    assert load_run_config(path).name == path.stem
    (line,) = (each for each in PAGE.read_text().splitlines() if f"[{path.stem}]" in each)
    seconds = re.search(r"\d+ s a step", text)
    assert (seconds[0] if seconds else "fits") in line, "docs/recipes.md has another figure"


def test_prepared_rows_are_chat_messages_with_the_answer():
    row = {"question": "1+1?", "answer": "1+1=2\n#### 2", "other": 3}
    assert prepared(row, "question", "answer") == {
        "prompt": [
            {"role": "system", "content": BOXED},
            {"role": "user", "content": "1+1?"},
        ],
        "answer": "1+1=2\n#### 2",
    }
