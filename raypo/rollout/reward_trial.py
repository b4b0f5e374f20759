"""Try a reward function on a few rows without a policy, before the first step samples.

The responses are made up: the row's right answer, no text, and a wrong answer. The function is
called as the run calls it (its form, its processes, its time limit), and may raise on none of them.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypo.concurrency import daemon_future
from raypo.data.prompts import LoadedPrompts
from raypo.rewards.scoring import RewardError, RewardFunction, has_ground_truth, score
from raypo.types import Prompt, Rollout

ROWS = 3
"""Rows of each source that a run tries."""
TRIAL_S = 10.0
"""Seconds after which a run goes on without the result of the trial."""
KINDS = ("right", "empty", "wrong")
"""Kinds of made-up responses."""
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target")
"""Columns in which data sets keep the right answer, for rows without a label."""
NO_ANSWER = "I do not know."
"""The wrong response, if no other row has another answer."""


@dataclass(frozen=True)
class Trial:
    """One call of a reward function with made-up responses of one kind."""

    kind: str
    rollouts: Sequence[Rollout]
    scores: Sequence[float]
    seconds: float


def first_of_each(loaded: LoadedPrompts, count: int = ROWS) -> list[Prompt]:
    """Return the first prompts of each source."""
    starts = itertools.accumulate(loaded.sizes, initial=0)
    return [
        loaded.prompts[start + number]
        for start, size in zip(starts, loaded.sizes, strict=False)
        for number in range(min(size, count))
    ]


def trials(function: RewardFunction, prompts: Sequence[Prompt], tokenizer: Any) -> Iterator[Trial]:
    """Call a reward function once for each kind of response, with one response per prompt.

    Prompts without a known answer have no right response.

    Raises:
        RewardError: the function raised an error, or returned something other than scores.
    """
    answers = [right_answer(prompt) for prompt in prompts]
    for number, kind in enumerate(KINDS):
        rollouts = [
            _rollout(prompt, text, index, number, tokenizer)
            for index, prompt in enumerate(prompts)
            if (text := _response(kind, index, answers)) is not None
        ]
        if not rollouts:
            continue
        begin = time.perf_counter()
        try:
            scores = score(function, rollouts)
        except RewardError as error:
            raise RewardError.caused_by(
                error,
                f"{error} The responses were made up to try the function on the first rows; these "
                f"were {_WORDS[kind]}.",
            ) from error
        yield Trial(kind, rollouts, scores, time.perf_counter() - begin)


_WORDS = {"right": "the right answers", "empty": "empty", "wrong": "wrong answers"}


def try_before_start(
    function: RewardFunction,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    say: Callable[[str], object],
) -> None:
    """Try a run's reward function, but wait at most `TRIAL_S` seconds for it.

    Args:
        function: The function.
        prompts: A few prompts of each source.
        tokenizer: The policy's tokenizer.
        say: Callback for a line to the user if the function is slow.

    Raises:
        RewardError: as `trials`.
    """
    deadline = time.monotonic() + TRIAL_S

    def try_it() -> None:
        for _ in trials(function, prompts, tokenizer):
            if time.monotonic() > deadline:
                return

    answer = daemon_future(try_it, name="raypo-reward-trial")
    if wait([answer], TRIAL_S).done:
        answer.result()
    else:
        say(
            f"{function} gave no scores for {len(prompts)} made-up responses in {TRIAL_S:g} s; the "
            "run goes on. `raypo try-reward` tries it alone."
        )


def right_answer(prompt: Prompt) -> str | None:
    """Return the right answer of a row as a response would state it, or None if it is unknown."""
    row, label = prompt.row, prompt.label
    if has_ground_truth(row):
        label = row["reward_model"]["ground_truth"]
    if label is None:
        label = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    if isinstance(label, Mapping):  # an entry of reasoning-gym
        label = label.get("answer", label)
    if label is None or isinstance(label, str):
        return label
    return json.dumps(label, default=str, ensure_ascii=False)


def _response(kind: str, index: int, answers: Sequence[str | None]) -> str | None:
    if kind == "right":
        return answers[index]
    if kind == "empty":
        return ""
    wrong = (answer for answer in answers if answer not in (None, answers[index]))
    return next(wrong, NO_ANSWER)


def _rollout(prompt: Prompt, text: str, group: int, sample: int, tokenizer: Any) -> Rollout:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    response_ids = np.asarray([*ids, *end], dtype=np.int32)
    return Rollout(
        prompt=prompt.text,
        response=text,
        prompt_ids=prompt.token_ids,
        response_ids=response_ids,
        log_probs=np.zeros(len(response_ids), dtype=np.float32),
        response_mask=np.ones(len(response_ids), dtype=bool),
        label=prompt.label,
        prompt_index=prompt.index,
        sample_index=sample,
        finish_reason="stop",
        weight_version=0,
        group_index=group,
        messages=prompt.messages,
        data_source=prompt.data_source,
        row=prompt.row,
        images=prompt.images,
    )
