"""Learning rates by step."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    step: int,
    num_steps: int,
    *,
    highest: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int = 0,
) -> float:
    """The learning rate of a step, counted from 1.

    It rises on a line over `warmup_steps`, reaches `highest` on the step after them, and falls so
    that a step after the last would have 0.

    Example: 4 steps, linear, no warm-up: 1, 3/4, 1/2, 1/4 of the highest.
    """
    if step <= warmup_steps:
        return highest * step / (warmup_steps + 1)
    if schedule == "constant":
        return highest
    done = (step - 1 - warmup_steps) / max(num_steps - warmup_steps, 1)
    if schedule == "linear":
        return highest * (1.0 - done)
    return highest * 0.5 * (1.0 + math.cos(math.pi * done))
