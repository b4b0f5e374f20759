"""Search-space domains of a sweep: `choice`, `grid`, `uniform` and the like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RANGES = {
    "uniform": "[low, high]",
    "loguniform": "[low, high], both above 0",
    "randint": "[low, high], whole numbers, high left out",
}
"""Format of the values of a range, by kind."""
LISTS = ("choice", "grid")
MAX_TEST_VALUES = 100
"""Approximate maximum number of whole numbers of a range that are validated."""
KINDS = (*LISTS, *RANGES)


@dataclass(frozen=True)
class Domain:
    """Values that a key may take, written in the sweep file like `{loguniform: [1.0e-4, 1.0]}`."""

    kind: str
    values: tuple[Any, ...]

    @classmethod
    def parse(cls, key: str, domain: Any) -> Domain:
        """Parse the domain of a key.

        Raises:
            ValueError: the value in the file is not a domain. The message has key, value, rule and
                remedy.
        """
        if not isinstance(domain, Mapping) or len(domain) != 1 or next(iter(domain)) not in KINDS:
            raise ValueError(
                f"space.{key} ({domain!r}): must be one of {', '.join(KINDS)} with its values. "
                f"Write it like {{loguniform: [1.0e-4, 1.0]}} or {{choice: [0.1, 0.2]}}."
            )
        ((kind, values),) = domain.items()
        if not isinstance(values, list | tuple) or not values:
            raise ValueError(
                f"space.{key} ({kind}: {values!r}): must be a list of values. Write "
                f"{kind}: {RANGES.get(kind, '[first, second]').split(', both')[0]}."
            )
        if kind in RANGES:
            _check_range(key, kind, list(values))
        elif len({repr(value) for value in values}) < len(values):
            raise ValueError(
                f"space.{key} ({kind}: {list(values)!r}): a value is listed twice. Remove one."
            )
        return cls(kind, tuple(values))

    @property
    def is_list(self) -> bool:
        """True if the domain is a list of values rather than a range."""
        return self.kind in LISTS

    @property
    def test_values(self) -> tuple[Any, ...]:
        """Values of the domain to validate a config with.

        A list gives all its values. A continuous range gives its two ends. A range of whole numbers
        gives about `MAX_TEST_VALUES` values, including the last one.
        """
        if self.kind != "randint":
            return self.values
        numbers = range(*self.values)
        step = max(1, len(numbers) // MAX_TEST_VALUES)
        return tuple(dict.fromkeys([*numbers[::step], numbers[-1]]))

    def nearest(self, value: Any) -> Any:
        """Return the value of a range that is nearest to `value`. For a list, return `value`."""
        if self.is_list:
            return value
        low, high = self.values
        if self.kind == "randint":
            return int(min(max(value, low), high - 1))
        return float(min(max(value, low), high))

    def as_written(self) -> dict[str, list[Any]]:
        """Return the domain as written in the sweep file."""
        return {self.kind: list(self.values)}

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(_short(value) for value in self.values)}"


def flat_space(space: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a search space as a flat mapping: `{"ppo.kl.coef": {"uniform": [0, 1]}}`.

    Nested keys, as in overrides, become dotted keys.
    """
    flat: dict[str, Any] = {}
    for key, value in space.items():
        is_nested = isinstance(value, Mapping) and value and not set(value) & set(KINDS)
        if is_nested and all(isinstance(entry, Mapping) for entry in value.values()):
            flat |= flat_space(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_range(key: str, kind: str, values: list[Any]) -> None:
    def refuse(rule: str, remedy: str) -> None:
        raise ValueError(f"space.{key} ({kind}: {values!r}): {rule}. {remedy}.")

    form_remedy = f"Write {kind}: {RANGES[kind]}"
    if len(values) != 2:
        refuse(f"must be {RANGES[kind]}", form_remedy)
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            refuse("must be numbers", form_remedy)
        if kind == "randint" and not isinstance(value, int):
            refuse("must be whole numbers", form_remedy)
    low, high = values
    if not low < high:
        refuse(f"low ({low:g}) must be below high ({high:g})", "Swap or change them")
    if kind == "loguniform" and low <= 0:
        refuse(f"low ({low:g}) must be above 0", "Choose a small positive number, or uniform")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
