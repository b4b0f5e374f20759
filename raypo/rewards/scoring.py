"""Call a reward function and validate its scores."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from numbers import Real
from typing import Any, Self

import numpy as np

from raypo.concurrency import background_future
from raypo.custom.errors import UserCodeError, text_of
from raypo.custom.loader import (
    GROUND_TRUTH,
    function_name,
    keyword_parameters,
    load_function,
    takes_columns,
    takes_ground_truth,
)
from raypo.pending_work import at_work, moved
from raypo.types import Rollout

RewardFunction = Callable[..., Any]
"""Function of a list of rollouts that returns one score per rollout. Two other forms are accepted:
TRL's `f(prompts, completions, **columns)`, and verl's
`compute_score(data_source, solution_str, ground_truth, extra_info)`, which is called for each
response. Coroutine functions are awaited."""
SCORE = "score"
"""Key of the total score in a score with named parts. The total score is the one to train on."""


_LOOP = "raypo-rewards"
"""Name of the event loop of coroutine functions, and of its thread."""
LARGEST = float(np.finfo(np.float32).max)
"""Largest allowed score. Training computes in float32, in which larger scores are infinite."""

LARGEST_COUNT = 1 << 24
"""Largest score up to which float32 holds all integers."""


class RewardError(UserCodeError):
    """The reward function raised an error, or returned something other than scores."""


class ScoreOfParts(float):
    """A score together with its named parts."""

    parts: Mapping[str, float]
    texts: Mapping[str, str]
    """Named strings, such as the answer of a judge. They are saved with the rollouts."""

    def __new__(
        cls, value: float, parts: Mapping[str, float], texts: Mapping[str, str] | None = None
    ) -> Self:
        """Return a score with its parts and texts."""
        score = super().__new__(cls, value)
        score.parts, score.texts = parts, texts or {}
        return score

    def __getnewargs__(self) -> tuple[Any, ...]:  # for pickling between workers
        return (float(self), self.parts, self.texts)


class FailedScore(ScoreOfParts):
    """Score of a failed sample: NaN, with the reason of the failure."""

    reason: str

    def __new__(
        cls,
        reason: str,
        parts: Mapping[str, float] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> Self:
        """Return NaN with a reason."""
        failed = super().__new__(cls, math.nan, parts or {}, texts)
        failed.reason = reason
        return failed

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.reason, self.parts, self.texts)


def parts_of(score: float) -> Mapping[str, float]:
    """Return the named parts of a score. A plain score has none."""
    return score.parts if isinstance(score, ScoreOfParts) else {}


def texts_of(score: float) -> Mapping[str, str]:
    """Return the named texts of a score. A plain score has none."""
    return score.texts if isinstance(score, ScoreOfParts) else {}


def first_reason(scores: Iterable[float]) -> str | None:
    """Return the reason of the first failed score, or None if no score has a reason."""
    return next((score.reason for score in scores if isinstance(score, FailedScore)), None)


def score(function: RewardFunction, rollouts: Sequence[Rollout]) -> list[float]:
    """Call a reward function with all rollouts. Return one score per rollout, NaN if it failed.

    None, NaN, infinity or an exception as a score marks a failed sample. True and False count as 1
    and 0. A mapping, such as `{"score": 1.2, "format": 0.2, "why": "..."}`, becomes a
    `ScoreOfParts`.

    Raises:
        RewardError: the function raises an error (which is the cause of this one), does not return
            one number per rollout, or returns a number that float32 cannot hold.
    """
    if not rollouts:
        return []
    name = f"the reward function {function_name(function)}"
    answers = answers_of(function, list(rollouts))
    return [_number(answer, index, name) for index, answer in enumerate(answers)]


def answers_of(function: RewardFunction, rollouts: list[Rollout]) -> list[Any]:
    """Call a reward function like `call`, but wrap its exceptions in a RewardError."""
    try:
        return call(function, rollouts)
    except RewardError:
        raise
    except Exception as error:
        raise RewardError.caused_by(
            error,
            f"the reward function {function_name(function)} raised {type(error).__name__}: "
            f"{text_of(error)} (for {len(rollouts)} rollouts). Correct the function; to leave "
            "single samples out, return None for them.",
        ) from error


def call(function: RewardFunction, rollouts: list[Rollout]) -> list[Any]:
    """Call a reward function of any form. Return its scores, one per rollout, unvalidated.

    Raises:
        RewardError: the function returns a list of another length, or no list.
        Exception: any error of the function.
    """
    name = f"the reward function {function_name(function)}"
    with at_work(f"{name} ({len(rollouts)} responses)"):
        if takes_columns(function):
            answer = function(**_columns(function, rollouts))
        elif takes_ground_truth(function):
            answer = _one_by_one(function, rollouts)
        else:
            answer = function(rollouts)
        answer = _awaited(answer) if inspect.isawaitable(answer) else answer
    return _as_list(answer, len(rollouts), name)


def _columns(function: RewardFunction, rollouts: list[Rollout]) -> dict[str, list[Any]]:
    """Return the arguments of a function of TRL's form: lists with one entry per rollout.

    A response to chat messages is a list of one message, as in TRL. A function without `**columns`
    gets only the columns that it names. If a row lacks a column that another row has, its entry is
    None.
    """
    columns = {name for rollout in rollouts for name in rollout.row}
    values = {name: [rollout.row.get(name) for rollout in rollouts] for name in columns}
    values["prompts"] = [r.prompt if r.messages is None else r.messages for r in rollouts]
    values["completions"] = [
        r.response if r.messages is None else [{"role": "assistant", "content": r.response}]
        for r in rollouts
    ]
    values["completion_ids"] = [rollout.response_ids.tolist() for rollout in rollouts]
    values.pop("prompt", None)  # it is passed as `prompts`; TRL does not pass it twice either
    parameters = keyword_parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _one_by_one(function: RewardFunction, rollouts: list[Rollout]) -> Any:
    """Call a function of verl's form for each response; return the scores, or their awaitable.

    If a row lacks a column, the function gets a default: an empty dict for `extra_info` (as in
    verl), the name of the row's prompt source for `data_source`, and the row's label for
    `reward_model["ground_truth"]`.
    """
    parameters = keyword_parameters(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    passed = [name for name in GROUND_TRUTH if takes_all or name in parameters]
    answers = []
    for rollout in rollouts:
        row = rollout.row
        values = {
            "data_source": row.get("data_source", rollout.data_source),
            "solution_str": rollout.response,
            "ground_truth": row["reward_model"]["ground_truth"]
            if has_ground_truth(row)
            else rollout.label,
            "extra_info": row.get("extra_info") or {},
        }
        answers.append(function(**{name: values[name] for name in passed}))
        moved()
    if answers and all(map(inspect.isawaitable, answers)):
        return _gathered(answers)
    return answers


def has_ground_truth(row: Mapping[str, Any]) -> bool:
    """Return True if a row has `reward_model["ground_truth"]`, as rows of verl's data sets do."""
    graded = row.get("reward_model")
    return isinstance(graded, Mapping) and "ground_truth" in graded


async def _gathered(answers: list[Awaitable[Any]]) -> list[Any]:
    async def answer_of(awaitable: Awaitable[Any]) -> Any:
        answer = await awaitable
        moved()
        return answer

    return list(await asyncio.gather(*map(answer_of, answers)))


class WeightedSum:
    """Reward function that returns the weighted sum of several functions' scores.

    The score of each function becomes a metric. A function may return None to leave a sample out. A
    sample that no function scores has failed. If the score of a function has named parts or texts,
    the result has them under the names `<function>/<part>`.
    """

    def __init__(self, functions: Sequence[RewardFunction | str], weights: Sequence[float]) -> None:
        """Store the functions and their weights.

        Args:
            functions: Functions or import paths. Each process imports a path itself, because a
                function of a file cannot be unpickled in a process that has not loaded the file.
            weights: A factor for each function.
        """
        self.functions, self.weights = list(functions), list(weights)

    def __str__(self) -> str:
        return ", ".join(map(function_name, self.functions))

    @property
    def names(self) -> list[str]:
        """Names of the parts: the functions' names.

        Equal names get a number. So does a function named `score`, because the sum has that name.
        """
        plain = [
            function.rpartition(":")[2]
            if isinstance(function, str)
            else getattr(function, "__name__", type(function).__name__)
            for function in self.functions
        ]
        return [
            f"{name}_{number}" if name == SCORE or plain.count(name) > 1 else name
            for number, name in enumerate(plain, start=1)
        ]

    def __call__(self, rollouts: list[Rollout]) -> list[Any]:
        """Return a score with named parts per rollout."""
        names = self.names
        by_function = [
            score(load_function(function) if isinstance(function, str) else function, rollouts)
            for function in self.functions
        ]
        answers: list[Any] = []
        for scores in zip(*by_function, strict=True):
            parts: dict[str, Any] = {}
            for name, value in zip(names, scores, strict=True):
                named = {**parts_of(value), **texts_of(value)}
                parts |= {f"{name}/{part}": entry for part, entry in named.items()}
                parts |= {name: float(value)} if math.isfinite(value) else {}
            total = sum(
                w * s for w, s in zip(self.weights, scores, strict=True) if math.isfinite(s)
            )
            reason = first_reason(scores) or "no reward function gave a score"
            is_scored = any(map(math.isfinite, scores))
            answers.append({**parts, SCORE: total if is_scored else RuntimeError(reason)})
        return answers


def too_many_failures(
    num_failed: int,
    num_all: int,
    example: Rollout,
    *,
    name: str,
    max_failed_fraction: float,
    reason: str | None,
) -> RewardError:
    """Return the error for more failed samples than `reward.max_failed_fraction` allows."""
    if reason is not None:
        return RewardError(
            f"reward.max_failed_fraction ({max_failed_fraction}): {num_failed} of {num_all} "
            f"rollouts ({num_failed / num_all:.3g}) have no score. The first error: {reason}. "
            f"Correct its cause, or set reward.max_failed_fraction higher so that such samples "
            f"are left out."
        )
    return RewardError(
        f"reward.max_failed_fraction ({max_failed_fraction}): {name} gave None or a number "
        f"that is not finite for {num_failed} of {num_all} rollouts ({num_failed / num_all:.3g}). "
        f"The first has the prompt {_short(example.prompt)} and the response "
        f"{_short(example.response)}. Correct the function, or set reward.max_failed_fraction "
        "higher so that such samples are left out."
    )


def _awaited(answer: Awaitable[Any]) -> Any:
    """Wait for the answer of a coroutine function.

    All calls of a process share an event loop, because clients, locks and semaphores that a
    function keeps from one call to the next work only in the loop of their first use.
    """

    async def run() -> Any:
        return await answer

    if threading.current_thread().name == _LOOP:  # a function called by another: the loop is busy
        with ThreadPoolExecutor(1) as executor:
            return executor.submit(lambda: asyncio.run(run())).result()
    future = background_future(run(), loop=_LOOP)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _as_list(answer: Any, expected: int, name: str) -> list[Any]:
    if hasattr(answer, "tolist"):  # numpy, torch, pandas
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise RewardError(
            f"{name} returned {type(answer).__name__}. Return a list of one score per rollout."
        )
    if len(answer) != expected:
        raise RewardError(
            f"{name} returned {len(answer)} scores for {expected} rollouts. Return one score per "
            "rollout, in their order, and None for a rollout without a score."
        )
    return list(answer)


def _number(answer: Any, index: int, name: str) -> float:
    """Return a score as a float, NaN if it failed."""
    if answer is None:
        return math.nan
    if isinstance(answer, Exception):
        return FailedScore(text_of(answer) or type(answer).__name__)
    if isinstance(answer, Mapping):
        return score_of_parts(answer, index, name)
    if hasattr(answer, "item"):  # numpy, torch; item() raises if there is more than one number
        with suppress(ValueError, RuntimeError):
            answer = answer.item()
    if not isinstance(answer, Real):
        raise RewardError(
            f"{name} returned {_short(answer)} ({type(answer).__name__}) as score {index}. "
            "Return a number, or None if there is no score."
        )
    if is_too_large(answer):
        raise RewardError(
            f"{name} returned {_short(answer)} as score {index}. Scores are at most "
            f"{LARGEST:.2g}, the largest number of float32. Return smaller numbers, or None if "
            "there is no score."
        )
    value = float(answer)
    if abs(value) > LARGEST_COUNT and abs(float(np.float32(value)) - value) >= 0.5:
        warnings.warn(
            f"{name} returned a score above {LARGEST_COUNT} that training rounds by 1 or more, "
            "because it computes in float32. Scores that differ by less become equal. Return "
            "smaller numbers: subtract a constant from all scores, or divide them.",
            stacklevel=2,
        )
    return value if math.isfinite(value) else math.nan


def is_too_large(score: Real) -> bool:
    """Return True if a finite number of any type exceeds the range of float32."""
    return LARGEST < abs(score) != math.inf  # pyright: ignore[reportOperatorIssue]


def score_of_parts(answer: Mapping[Any, Any], index: int, name: str) -> float:
    """Return the score of a mapping of named parts. Parts that are None or not finite are dropped.

    Args:
        answer: The mapping. String values become the score's `texts`.
        index: Index of the rollout, for messages.
        name: Name of the function that returned the mapping, for messages.

    Raises:
        RewardError: the mapping has no `score`, or a value is neither number nor string.
    """
    if SCORE not in answer or not all(isinstance(key, str) for key in answer):
        raise RewardError(
            f"{name} returned {_short(answer)} as score {index}. The names of parts must be "
            f"texts, and the part {SCORE!r}, which is trained on, is required."
        )
    texts = {key: part for key, part in answer.items() if isinstance(part, str) and key != SCORE}
    parts = {
        key: _number(part, index, f"{name}, part {key!r},")
        for key, part in answer.items()
        if key not in texts
    }
    value = parts.pop(SCORE)
    finite_parts = {key: float(part) for key, part in parts.items() if math.isfinite(part)}
    if isinstance(value, FailedScore):
        return FailedScore(value.reason, finite_parts, texts)
    return ScoreOfParts(value, finite_parts, texts)


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # an object's repr may raise
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
