"""Writes the table of metrics in docs/outputs.md from raypo/metrics/catalogue.py: `make docs`."""

import re
from pathlib import Path

from raypo.metrics.catalogue import MEANINGS

PAGE = Path(__file__).parents[1] / "docs" / "outputs.md"


def with_table(text: str) -> str:
    """The page with the table as the catalogue has it."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in MEANINGS.items()]
    table = "\n".join(["| name | meaning |", "|---|---|", *rows])
    parts = re.split(r"(?<=metrics/catalogue.py -->\n\n)\| name .*?(?=\n\n)", text, flags=re.DOTALL)
    assert len(parts) == 2, f"{PAGE} has {len(parts) - 1} tables of metrics"
    return table.join(parts)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
