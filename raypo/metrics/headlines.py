"""Which metrics say whether a run worked, and where they stood before the first update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

HEADLINES: tuple[tuple[str, str, int], ...] = (
    ("eval/score_mean", "held-out score", 1),
    ("eval/accuracy", "held-out accuracy", 1),
    ("eval/loss", "held-out loss", -1),
    ("rollout/score_mean", "training score", 1),
    ("train/accuracy", "training accuracy", 1),
    ("train/loss", "training loss", -1),
)
"""Metrics that say whether a run worked, the first that it has counts; and which way is good."""

TRAINED = tuple(each for each in HEADLINES if each[0] in ("rollout/score_mean", "train/loss"))
"""What a run is trained on, by its recipe."""


def before_and_after(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """A metric before the first update and at the end; None where there is none."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    start = reference(rows, name)
    if not values:
        return None
    return (values[0] if start is None else start), values[-1]


def reference(rows: Sequence[Row], name: str) -> float | None:
    """A metric before the first update: `eval/initial_score_mean` for `eval/score_mean`.

    What is sampled anew each step has its value of before the first update in the first row.
    """
    if not rows:
        return None
    group, _, metric = name.partition("/")
    stored = rows[0].get(f"{group}/initial_{metric}")
    if stored is None and group == "rollout" and rows[0].get("step") == 1:
        stored = rows[0].get(name)
    return stored if stored is not None and math.isfinite(stored) else None
