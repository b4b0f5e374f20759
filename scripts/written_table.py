"""Tables of the docs that `make docs` writes, below a comment with their source."""

import re
from collections.abc import Iterable, Sequence


def with_table(
    text: str, source: str, head: Sequence[str], rows: Iterable[Sequence[object]]
) -> str:
    """Return a page with its table below the comment of a source replaced.

    Args:
        text: The page, which has one such table.
        source: The source's path, with which the comment ends.
        head: Titles of the columns.
        rows: Cells of each row.
    """
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    table = "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])
    old = rf"(?<={re.escape(source)} -->\n\n)\| {head[0]} .*?(?=\n\n)"
    page, count = re.subn(old, lambda _: table, text, flags=re.DOTALL)
    assert count == 1, f"the page has {count} tables of {source}"
    return page
