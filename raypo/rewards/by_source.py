"""One reward function that dispatches on the source of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raypo.custom.loader import load_function
from raypo.rewards.scoring import RewardFunction, answers_of
from raypo.types import Rollout


class RewardBySource:
    """Reward function that calls the function of each rollout's source, or a common one.

    It can be pickled, because functions are stored as import paths and imported when called.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        common: RewardFunction | str | None,
        *,
        key: str = "data.prompts.function",
    ) -> None:
        """Store the import paths; functions are imported when they are first called.

        Args:
            functions: Import path (`file.py:name` or `package.module:name`) of the function of
                each source, by the source's name.
            common: Function or import path for all other sources. None means that every source has
                its own function.
            key: Config key of `functions`, for error messages.
        """
        self._functions, self._common, self._key = dict(functions), common, key

    def __str__(self) -> str:
        return f"of {', '.join(self._functions)}"

    def load(self) -> None:
        """Import all functions.

        Raises:
            ConfigError: a function cannot be imported.
        """
        for source in (None, *self._functions):
            self._function(source)

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Return the scores in the order of the rollouts. Each function is called once.

        Raises:
            RewardError: a function raises an error, or does not return one score per rollout.
        """
        indices_of: dict[str | None, list[int]] = {}
        for index, rollout in enumerate(rollouts):
            has_own = rollout.data_source in self._functions
            indices_of.setdefault(rollout.data_source if has_own else None, []).append(index)
        answers: list[Any] = [None] * len(rollouts)
        for source, indices in indices_of.items():
            function = self._function(source)
            assert function is not None, f"{source} has no judge, which raypo.checks refuses"
            scores = answers_of(function, [rollouts[index] for index in indices])
            for index, answer in zip(indices, scores, strict=True):
                answers[index] = answer
        return answers

    def _function(self, source: str | None) -> RewardFunction | None:
        if source is not None:
            return load_function(self._functions[source], key=self._key)
        return load_function(self._common) if isinstance(self._common, str) else self._common
