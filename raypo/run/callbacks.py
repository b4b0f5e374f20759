"""User callbacks, which are called after each step and may add metrics to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from numbers import Real
from typing import Any

from raypo.custom.errors import UserCodeError, text_of
from raypo.custom.loader import function_name
from raypo.types import Rollout


class CallbackError(UserCodeError):
    """A callback raised an error, or returned something other than metrics."""


@dataclass(frozen=True)
class StepView:
    """A completed step as a callback sees it. Callbacks run on rank 0, with data of all workers."""

    step: int
    """Number of the step, counted from 1."""
    metrics: Mapping[str, float]
    """Metrics of the step so far. Times and rates are added after the callbacks."""
    rollouts: Sequence[Rollout]
    """All samples of the step with their scores. Recipes that do not sample have none."""


def by_name(callbacks: Iterable[Callable[[StepView], Any]]) -> dict[str, Callable[..., Any]]:
    """Return callbacks by name. If several share a name, as lambdas do, later ones get a number."""
    named: dict[str, Callable[..., Any]] = {}
    for callback in callbacks:
        name = function_name(callback)
        numbered = (f"{name} ({number})" for number in count(2))
        named[next(n for n in chain([name], numbered) if n not in named)] = callback
    return named


def ask_callbacks(
    callbacks: Mapping[str, Callable[[StepView], Any]], view: StepView
) -> dict[str, float]:
    """Call the callbacks, and return the metrics that they add to a step.

    Args:
        callbacks: Callbacks by their path in the config or their name.
        view: The step.

    Raises:
        CallbackError: a callback raised an error, or returned something other than None or a
            mapping of new metric names to numbers.
    """
    added: dict[str, float] = {}
    for path, callback in callbacks.items():
        label = f"callbacks ({path})"
        try:
            answer = callback(view)
        except Exception as error:
            raise CallbackError.caused_by(
                error,
                f"{label} raised {type(error).__name__}: {text_of(error)} (step {view.step}). "
                "Correct it.",
            ) from error
        if answer is None:
            continue
        if not isinstance(answer, Mapping):
            raise CallbackError(
                f"{label} returned {type(answer).__name__}. Return metrics by name, like "
                '{"mine/long_words": 0.5}, or nothing.'
            )
        for name, value in answer.items():
            added[_new(name, label, {**view.metrics, **added})] = _number(value, name, label)
    return added


def _new(name: Any, label: str, existing: Mapping[str, float]) -> str:
    if isinstance(name, str) and name and name not in existing:
        return name
    what = "a metric with this name exists already" if name in existing else "a name must be a text"
    raise CallbackError(
        f"{label} returned {name!r}: {what}. Rename it, for example to mine/{name}."
    )


def _number(value: Any, name: str, label: str) -> float:
    if hasattr(value, "item"):  # numpy, torch
        value = value.item()
    if isinstance(value, Real):
        return float(value)
    if value is None:
        return math.nan
    raise CallbackError(
        f"{label} returned {name}: {value!r} ({type(value).__name__}). Metrics must be numbers."
    )
