"""Writes the table of metrics in docs/outputs.md from raypo/metrics/catalogue.py: `make docs`."""

from pathlib import Path

from raypo.metrics.catalogue import MEANINGS
from scripts.written_table import with_table

PAGE = Path(__file__).parents[1] / "docs" / "outputs.md"


def with_metrics(text: str) -> str:
    """The page with the table as the catalogue has it."""
    rows = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    return with_table(text, "raypo/metrics/catalogue.py", ("name", "meaning"), rows)


if __name__ == "__main__":
    PAGE.write_text(with_metrics(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
