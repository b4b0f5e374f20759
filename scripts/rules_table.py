"""Writes the table of rules on a run's health in docs/doctor.md from raypo/health: `make docs`."""

from pathlib import Path

from raypo.health.rules import RULES
from scripts.written_table import with_table

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


def with_rules(text: str) -> str:
    """The page with the table as the docstrings of the rules have it."""
    rows = [(f"`{rule.name}`", rule.definition, rule.within) for rule in RULES]
    return with_table(text, "raypo/health", ("rule", "it matches if", "within"), rows)


if __name__ == "__main__":
    PAGE.write_text(with_rules(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
