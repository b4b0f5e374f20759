"""Declaration, on the field of a key, that the key has no effect unless another key has certain
values. Error messages and docs/configuration.md are generated from it.

    cap: Annotated[float | None, only_if("kind", "tis", "mis")] = None
    clip_low: Annotated[float, unless("policy_loss", "cispo")] = 0.2
    min_std: Annotated[float, only_if("enabled", True)] = 1e-6
    delta: Annotated[float, only_if("target", SET)] = 0.005
    mode: Annotated[str, only_if("at", SET) | only_if("patience", SET)] = "max"

A name without a dot is a key of the same section; with a dot it is a key of the file. Several
declarations of a field must all hold. A declaration on a section applies to all keys below it. It
applies only in run files that have the other key.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from raypo.config.fields import known_keys, section_of, yaml_text


@dataclass(frozen=True)
class Values:
    """A set of values that cannot be listed."""

    text: str
    """The set in words, as after "is": "set", "above 0"."""
    contains: Callable[[Any], bool] = field(compare=False)


SET = Values("set", lambda value: value is not None)
"""All values except null."""


def above(bound: float) -> Values:
    """Return all numbers above a bound."""
    return Values(
        f"above {bound:g}", lambda value: isinstance(value, int | float) and value > bound
    )


def below(bound: float) -> Values:
    """Return all numbers below a bound."""
    return Values(
        f"below {bound:g}", lambda value: isinstance(value, int | float) and value < bound
    )


def with_prefix(prefix: str) -> Values:
    """Return all texts that start with a prefix."""
    return Values(f"{prefix}...", lambda value: isinstance(value, str) and value.startswith(prefix))


@dataclass(frozen=True)
class Condition:
    """A condition on the value of another key."""

    key: str
    values: tuple[Any, ...]
    """Values that satisfy the condition."""
    is_negated: bool = False

    def holds(self, value: Any) -> bool:
        """Return whether the other key's value meets the condition."""
        return self.is_negated != any(
            expected.contains(value) if isinstance(expected, Values) else expected == value
            for expected in self.values
        )

    @property
    def text(self) -> str:
        """The values in words: "ppo or gspo"."""
        *first, last = (
            value.text if isinstance(value, Values) else yaml_text(value) for value in self.values
        )
        values = f"{', '.join(first)} or {last}" if first else last
        return f"not {values}" if self.is_negated else values

    @property
    def remedy(self) -> str:
        """Advice how to change the other key so that the condition holds."""
        if self.is_negated:
            return f"set {self.key} to another value"
        if self.values == (SET,):
            return f"set {self.key}"
        to = "" if self.text.startswith(("above ", "below ")) else "to "
        return f"set {self.key} {to}{self.text}"


@dataclass(frozen=True)
class OnlyIf:
    """Declaration that a key has no effect unless one of the conditions holds."""

    conditions: tuple[Condition, ...]

    def __or__(self, other: OnlyIf) -> OnlyIf:
        """Return a declaration that holds if either of the two holds."""
        return OnlyIf((*self.conditions, *other.conditions))

    @property
    def text(self) -> str:
        """The conditions in words: "`stop.at` or `stop.patience` is set"."""
        keys_by_text: dict[str, list[str]] = {}
        for condition in self.conditions:
            keys_by_text.setdefault(condition.text, []).append(f"`{condition.key}`")
        return " or ".join(f"{' or '.join(keys)} is {text}" for text, keys in keys_by_text.items())

    def holds(self, config: BaseModel) -> bool:
        """Return whether a condition holds in a run file."""
        return any(
            condition.holds(value_at(config, condition.key)) for condition in self.conditions
        )

    def in_section(self, prefix: str) -> OnlyIf:
        """Return the declaration with full keys, for a field below `prefix`."""
        conditions = (
            condition if "." in condition.key else replace(condition, key=prefix + condition.key)
            for condition in self.conditions
        )
        return OnlyIf(tuple(conditions))


def only_if(key: str, *values: Any) -> OnlyIf:
    """Declare that a field has an effect only if another key has one of the values."""
    return OnlyIf((Condition(key, values),))


def unless(key: str, *values: Any) -> OnlyIf:
    """Declare that a field has no effect if another key has one of the values."""
    return OnlyIf((Condition(key, values, is_negated=True),))


@functools.cache
def declarations(root: type[BaseModel]) -> dict[str, tuple[OnlyIf, ...]]:
    """Return the declarations of a run file's keys, by key, with full keys in their conditions."""
    keys = {*known_keys(root)}
    applicable = {
        key: tuple(d for d in rules if all(c.key in keys for c in d.conditions))
        for key, rules in _iterate_declarations(root)
    }
    return {key: rules for key, rules in applicable.items() if rules}


def problems(config: Any) -> Iterator[str]:
    """Yield a message for each key of a run file that is set but has no effect."""
    rules = declarations(type(config))
    for key, value in config.set_keys(*rules):
        violated = next((d for d in rules[key] if not d.holds(config)), None)
        if violated is not None:
            causes = [f"{c.key} is {_shown(value_at(config, c.key))}" for c in violated.conditions]
            remedies = ", or ".join([f"Remove {key}", *(c.remedy for c in violated.conditions)])
            yield (
                f"{key} ({_shown(value)}): has no effect, because {' and '.join(causes)}. "
                f"{remedies}."
            )


def value_at(config: Any, key: str) -> Any:
    """Return the value at a dotted key, or None if one of its sections is null."""
    return functools.reduce(
        lambda section, name: getattr(section, name, None), key.split("."), config
    )


def _iterate_declarations(
    section: type[BaseModel], prefix: str = "", inherited: tuple[OnlyIf, ...] = ()
) -> Iterator[tuple[str, tuple[OnlyIf, ...]]]:
    for name, info in section.model_fields.items():
        marks = (mark.in_section(prefix) for mark in info.metadata if isinstance(mark, OnlyIf))
        rules = (*inherited, *marks)
        if subsection := section_of(info.annotation, items=False):
            yield from _iterate_declarations(subsection, f"{prefix}{name}.", rules)
        else:
            yield f"{prefix}{name}", rules


def _shown(value: Any) -> str:
    return yaml_text(value) if value is None or isinstance(value, bool | float) else str(value)
