"""Samples printed to the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from raypo.report.samples import by_sample, evenly, num_tokens, tokenizer_of, turns_of
from raypo.storage.rollout_table import PART
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from tokenizers import Tokenizer

Sample = Sequence[Mapping[str, Any]]
"""Rows of a sample, one for each conversation of its episode. Most samples have a single row."""

ORDERS: dict[str, Callable[[Sample], float]] = {
    "best": lambda rows: math.inf if rows[0]["score"] is None else -rows[0]["score"],
    "worst": lambda rows: math.inf if rows[0]["score"] is None else rows[0]["score"],
    "longest": lambda rows: -num_tokens(rows),
}
"""Sort keys of samples. In orders by score, samples without a score come last."""


def print_samples(
    files: RunFiles, step: int, order: str | None, count: int, stream: TextIO | None = None
) -> None:
    """Print samples of a step as panels.

    Args:
        files: Files of the run.
        step: A step whose rollouts are saved.
        order: One of ORDERS. None means evenly spaced samples.
        count: Maximum number of samples.
        stream: Output stream. None means standard output.
    """
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    tokenizer = tokenizer_of(files, files.config() or {})
    samples = by_sample(files.rollouts(step))
    scores = [rows[0]["score"] for rows in samples if rows[0]["score"] is not None]
    console = Console(file=stream, highlight=False)
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    how = f"{order} first" if order else "evenly chosen"
    head = f"{files.name}, step {step}: {len(samples)} samples{mean}; {how}"
    console.print(printable(head), markup=False)
    for rows in chosen(samples, order, count):
        console.print(Panel(_body(rows, tokenizer), title=Text(_title(rows)), title_align="left"))


def chosen(samples: Sequence[Sample], order: str | None, count: int) -> list[Sample]:
    """Return the first `count` samples in `order`, or evenly spaced ones if it is None."""
    if order:
        return sorted(samples, key=ORDERS[order])[:count]
    return evenly(samples, count)


def _title(rows: Sample) -> str:
    row = rows[0]
    score = "no score" if row["score"] is None else f"score {row['score']:.3g}"
    parts = [score]
    if row["advantage_mean"] is not None:
        parts.append(f"advantage {row['advantage_mean']:+.2f}")
    if row["kl"] is not None:
        parts.append(f"KL {sum(row['kl'] for row in rows):.2f}")
    cut = ", cut off" if any(row["finish_reason"] == "length" for row in rows) else ""
    episode = row["episode"] or {}
    if episode:
        parts.append(f"{episode['num_turns']} turns")
    parts.append(f"{num_tokens(rows)} tokens{cut}")
    parts += [f"{name} {value:.3g}" for name, value in episode.get("metrics") or ()]
    parts += [
        f"{name.removeprefix(PART)} {value:.3g}"
        for name, value in row.items()
        if name.startswith(PART) and value is not None
    ]
    sources = dict(row["scores_by_source"] or [])
    if len(sources) > 1:
        parts += [f"{name} {value:.3g}" for name, value in sources.items() if value is not None]
    return printable("  ".join(parts))


def _body(rows: Sample, tokenizer: Tokenizer | None) -> RenderableType:
    """Format a sample. Each turn begins with its author, as colours are lost in files."""
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    def line(text: str, style: str) -> Text:
        return Text(printable(text), style=style)

    lines: list[RenderableType] = []
    for number, row in enumerate(rows, start=1):
        if number > 1:
            lines.append(Rule(f"conversation {number} of {len(rows)}", style="dim"))
        lines.append(line(f"prompt: {row['prompt']}", "dim"))
        for turn in turns_of(row, tokenizer):
            earned = Text(f"  {turn.reward:+.3g}", style="bold") if turn.reward else Text()
            author, style = ("policy", "") if turn.by_policy else ("environment", "dim italic")
            lines.append(line(f"{author}: {turn.text}", style) + earned)
            lines += [line(f"  {words}", "dim") for words in turn.tools]
    if error := (rows[0]["episode"] or {}).get("error"):
        lines.append(line(f"failed: {error}", "bold"))
    for name, text in rows[0].get("reward_texts") or ():
        lines.append(line(f"{name}: {text}", "dim"))
    if rows[0]["label"] is not None:
        lines.append(line(f"label: {rows[0]['label']}", "dim"))
    for name, text in rows[0].get("row") or ():
        lines.append(line(f"{name}: {text}", "dim"))
    return Group(*lines)
