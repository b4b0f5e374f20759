"""Learning rate schedules."""

from __future__ import annotations

import math

from raypo.config import WorkersSection


def learning_rate(step: int, num_steps: int, *, highest: float, section: WorkersSection) -> float:
    """Return the learning rate of a step.

    It rises linearly over `lr_warmup_steps` and reaches `highest` on the next step. Then it decays
    by `lr_schedule`, and would reach `lr_floor` times `highest` on the step after the last one.

    Args:
        step: Step number, from 1.
        num_steps: Number of steps, including the warm-up.
        highest: Peak learning rate.
        section: Schedule, warm-up and floor.

    Example: 4 steps, linear, no warm-up, no floor: 1, 3/4, 1/2, 1/4 of the highest.

    Raises:
        ValueError: the schedule is unknown.

    Paper: Loshchilov and Hutter 2016, arXiv:1608.03983, eq. 5 (half a cosine, without restarts).
    """
    warmup, floor = section.lr_warmup_steps, section.lr_floor
    if step <= warmup:
        return highest * step / (warmup + 1)
    if section.lr_schedule == "constant":
        return highest
    progress = (step - 1 - warmup) / max(num_steps - warmup, 1)
    if section.lr_schedule == "linear":
        decay = 1.0 - progress
    elif section.lr_schedule == "cosine":
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"learner.lr_schedule ({section.lr_schedule}): has no implementation.")
    return highest * (floor + (1.0 - floor) * decay)
