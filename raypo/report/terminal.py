"""Samples in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from raypo.report.samples import tokenizer_of, turns_of
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from rich.console import RenderableType
    from tokenizers import Tokenizer

Sample = Mapping[str, Any]

ORDERS: dict[str, Callable[[Sample], float]] = {
    "best": lambda row: math.inf if row["score"] is None else -row["score"],
    "worst": lambda row: math.inf if row["score"] is None else row["score"],
    "longest": lambda row: -len(row["response_ids"]),
}
"""Orders of samples; one without a score comes last."""


def print_samples(
    files: RunFiles, step: int, order: str | None, count: int, stream: TextIO | None = None
) -> None:
    """Print samples of a step as panels.

    Args:
        files: The run.
        step: A step whose rollouts are saved.
        order: One of ORDERS; None: evenly over the step.
        count: How many at most.
        stream: Where to; None: standard output.
    """
    from rich.console import Console
    from rich.panel import Panel

    tokenizer = tokenizer_of(files, files.config() or {})
    rows = files.rollouts(step)
    scores = [row["score"] for row in rows if row["score"] is not None]
    console = Console(file=stream, highlight=False)
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    how = f"{order} first" if order else "evenly chosen"
    console.print(f"{files.name}, step {step}: {len(rows)} samples{mean}; {how}", markup=False)
    for row in chosen(rows, order, count):
        console.print(Panel(_body(row, tokenizer), title=_title(row), title_align="left"))


def chosen(rows: list[dict[str, Any]], order: str | None, count: int) -> list[dict[str, Any]]:
    """The first `count` rows of an order; None: with even gaps."""
    if order:
        return sorted(rows, key=ORDERS[order])[:count]
    gap = max(len(rows) / count, 1.0)
    return [rows[int(position * gap)] for position in range(min(count, len(rows)))]


def _title(row: Sample) -> str:
    score = "no score" if row["score"] is None else f"score {row['score']:.3g}"
    parts = [score]
    if row["advantage_mean"] is not None:
        parts.append(f"advantage {row['advantage_mean']:+.2f}")
    if row["kl"] is not None:
        parts.append(f"KL {row['kl']:.2f}")
    cut = ", cut off" if row["finish_reason"] == "length" else ""
    if episode := row.get("episode"):
        parts.append(f"{episode['num_turns']} turns")
    parts.append(f"{len(row['response_ids'])} tokens{cut}")
    sources = dict(row["scores_by_source"] or [])
    if len(sources) > 1:
        parts += [f"{name} {value:.3g}" for name, value in sources.items() if value is not None]
    return "  ".join(parts)


def _body(row: Sample, tokenizer: Tokenizer | None) -> RenderableType:
    """The prompt, what the policy wrote, and dimmed what an environment wrote between its turns."""
    from rich.console import Group
    from rich.text import Text

    lines = [Text(row["prompt"], style="dim")]
    for turn in turns_of(row, tokenizer):
        earned = Text(f"  {turn.reward:+.3g}", style="bold") if turn.reward else Text()
        lines.append(Text(turn.text, style="" if turn.by_policy else "dim italic") + earned)
    if error := (row.get("episode") or {}).get("error"):
        lines.append(Text(f"failed: {error}", style="bold"))
    if row["label"] is not None:
        lines.append(Text(f"label: {row['label']}", style="dim"))
    return Group(*lines)
