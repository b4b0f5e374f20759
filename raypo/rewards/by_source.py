"""Reward functions of single sources of prompts, as one function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypo.custom.loader import load_function
from raypo.rewards.scoring import RewardFunction, answers_of
from raypo.types import Rollout


class RewardBySource:
    """Each rollout is judged by the function of its source, or by the common one.

    It can be pickled: functions are named, and imported where they are called.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        common: RewardFunction | str | None,
        *,
        key: str = "data.prompts.function",
    ) -> None:
        """Functions are imported where they are first called.

        Args:
            functions: Name of a source -> `file.py:name` or `package.module:name`.
            common: Judges all other sources, a function or its import path; None: there are none.
            key: The config key that `functions` come from.
        """
        self._functions, self._common, self._key = dict(functions), common, key

    def __str__(self) -> str:
        return f"of {', '.join(self._functions)}"

    def load(self) -> None:
        """Import all functions, or raise ConfigError."""
        for source in (None, *self._functions):
            self._function(source)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """The answers of all functions, each called once, in the order given.

        Raises:
            RewardError: a function raises, or answers with something else than a list of so many.
        """
        places: dict[str | None, list[int]] = {}
        for place, rollout in enumerate(rollouts):
            known = rollout.data_source in self._functions
            places.setdefault(rollout.data_source if known else None, []).append(place)
        answers: list[Any] = [None] * len(rollouts)
        for source, own in places.items():
            function = self._function(source)
            assert function is not None, f"{source} has no judge, which raypo.checks refuses"
            given = answers_of(function, [rollouts[place] for place in own])
            for place, answer in zip(own, given, strict=True):
                answers[place] = answer
        return answers

    def _function(self, source: str | None) -> RewardFunction | None:
        if source is not None:
            return load_function(self._functions[source], key=self._key)
        return load_function(self._common) if isinstance(self._common, str) else self._common
