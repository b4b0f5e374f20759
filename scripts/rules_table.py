"""Writes the table of rules on a run's health in docs/doctor.md from raypo/health: `make docs`."""

import re
from pathlib import Path

from raypo.health.rules import RULES

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


def with_table(text: str) -> str:
    """The page with the table as the docstrings of the rules have it."""
    rows = [f"| `{rule.name}` | {rule.definition} | {rule.within} |" for rule in RULES]
    table = "\n".join(["| rule | it matches if | within |", "|---|---|---|", *rows])
    parts = re.split(r"(?<=raypo/health -->\n\n)\| rule .*?(?=\n\n)", text, flags=re.DOTALL)
    assert len(parts) == 2, f"{PAGE} has {len(parts) - 1} tables of rules"
    return table.join(parts)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
