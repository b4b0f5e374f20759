"""HTML pages of sections and blocks; each page is one file without external resources.

`run_page(runs)` is the page of one run, or of several on the same axes. Other pages are built from
the same blocks:

    page = Page("My sweep", subtitle="12 trials")
    trials = page.section("Trials", note="Ranked by the held-out score.")
    trials.add(Table(["trial", "score"], [["gentle", 0.81], ["bold", 0.64]]))
    trials.add(line_chart("Score", {"gentle": rows, "bold": others}, "eval/score_mean"))
    page.write("sweep.html")

A chart is None if no row has its metrics, and `add` skips None.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from raypo.storage.folder import finite, replace_file

COLOURS = (
    "#3b82f6",
    "#f97316",
    "#10a37f",
    "#a855f7",
    "#e5484d",
    "#8c6d46",
    "#e3b505",
    "#f08fc0",
    "#6b7280",
)
"""Colours by index of the run, so that a run has the same colour in all charts."""


@dataclass
class Words:
    """A paragraph; `strong` emphasises it."""

    text: str
    strong: bool = False


@dataclass
class Tiles:
    """Overview numbers, as tuples (label, value, earlier value or explanation)."""

    tiles: Sequence[tuple[str, str, str]]


@dataclass
class Notices:
    """Warnings, as tuples (when, what, remedy). If there are none, the text `none` is shown."""

    notices: Sequence[tuple[str, str, str]]
    none: str = ""


@dataclass
class Table:
    """A table of rows under headings. Numbers are shown with four significant digits."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def cells(self) -> list[list[str]]:
        """Return the rows as text."""
        return [[_cell(value) for value in row] for row in self.rows]


@dataclass
class Details:
    """A long text in a collapsible block."""

    title: str
    text: str


@dataclass
class Chart:
    """A plotly figure from `Figure.to_plotly_json`; its text takes the page's colours."""

    title: str
    figure: dict[str, Any]
    note: str = ""
    wide: bool = False


@dataclass
class Explorer:
    """An interactive chart of any metric, selected by name."""

    rows_by_run: Mapping[str, Sequence[Mapping[str, Any]]]

    def data(self) -> dict[str, Any]:
        """Return the metrics of each run as columns, for the page's script."""
        return {
            run: {
                name: [row.get(name) for row in rows]
                for name in dict.fromkeys(name for row in rows for name in row)
            }
            for run, rows in self.rows_by_run.items()
        }


@dataclass
class Samples:
    """A sample browser: filters by step and score, token colours, and one prompt across steps.

    Each sample is a mapping with `run`, `step`, `prompt`, `response` and optionally `prompt_id`,
    `label`, `score`, `advantage`, `kl`, `finish`, `held_out` and `num_tokens`. Optional lists with
    one entry per token are `tokens` (strings), `advantages`, and `changes` (log-prob minus that of
    the reference).
    """

    samples: Sequence[Mapping[str, Any]]


Block = Words | Tiles | Notices | Table | Details | Chart | Explorer | Samples


@dataclass
class Section:
    """Blocks under a heading."""

    title: str
    note: str = ""
    blocks: list[Block] = field(default_factory=list)

    @property
    def id(self) -> str:
        """HTML anchor of the section."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def add(self, *blocks: Block | None) -> Section:
        """Add blocks, except None, and return the section."""
        self.blocks += [block for block in blocks if block is not None]
        return self


@dataclass
class Page:
    """An HTML page. Sections without blocks are omitted."""

    title: str
    subtitle: str = ""
    badge: str = ""
    """A word next to the title: finished, running, failed."""
    sections: list[Section] = field(default_factory=list)
    version: str = ""
    """Version of a live page, whose script requests newer versions (`report.live_page`). It is
    empty for a page that does not change."""

    def section(self, title: str, note: str = "") -> Section:
        """Add a section and return it."""
        self.sections.append(Section(title, note))
        return self.sections[-1]

    def html(self, *, with_plotly: bool = True) -> str:
        """Render the whole page with its scripts and data. plotly.js takes 2 MB of it."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        sections = [section for section in self.sections if section.blocks]
        names: dict[int, str] = {}
        data: dict[str, Any] = {}
        for section in sections:
            for position, block in enumerate(section.blocks):
                name = names[id(block)] = f"{section.id}-{position}"
                if isinstance(block, Chart):
                    data[name] = block.figure
                elif isinstance(block, Explorer):
                    data[name] = block.data()
                elif isinstance(block, Samples):
                    data[name] = list(block.samples)
        environment = Environment(
            loader=PackageLoader("raypo.report"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        return environment.get_template("page.html").render(
            page=self,
            sections=sections,
            names=names,
            id=id,
            data=pack(json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"))),
            plotly=_packed_plotly() if with_plotly and (data or self.version) else "",
            colours=" ".join(COLOURS),
            style=_template("page.css"),
            script=_template("page.js"),
        )

    def write(self, path: str | Path) -> Path:
        """Write the page atomically."""
        path = Path(path)
        replace_file(path, self.html().encode("utf-8", "replace"))
        return path


def pack(text: str) -> str:
    """Compress a string with gzip and encode it in base64.

    The result is about a third as large, and cannot close the script element that contains it.
    """
    packed = gzip.compress(text.encode("utf-8", "replace"), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode()


def number(value: float) -> str:
    """Format a number with four significant digits. Only extreme values get an exponent."""
    if not math.isfinite(value):
        return "-"
    if abs(value) < 1e-8:  # zero, up to rounding errors
        return "0"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", " ")
    if 1e-4 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3g}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return number(float(value))
    return str(value)


@cache
def _packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack(get_plotlyjs())


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
