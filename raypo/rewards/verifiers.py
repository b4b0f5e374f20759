r"""Ready-made reward functions: `reward.function: raypo.rewards.verifiers:exact_match`.

Answers and labels may be bare (`42`), end like GSM8K's solutions (`#### 42`), or be in a box like
MATH's (`\boxed{42}`). `raypo.rewards.numbers` has a table of what is read as a number.

| response | its answer for `number_answer` |
|---|---|
| `... \boxed{42}`, `#### 42 apples` | 42: the number in the last box, else after the last `####` |
| `\boxed{2, 3}`, `#### 3 of 5`, `\boxed{x^2}` | none: not one number |
| `First 40, then 42.` | 42: without a box or `####`, the last number that stands alone |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import date, time
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any

import numpy as np

from raypo.rewards.numbers import WORD, numbers_in, parse_number
from raypo.types import Rollout

FORM_CREDIT = 0.1
"""Score of a wrong answer in the expected format."""
MAX_WORDS = 10
"""Maximum number of words of a label. Longer labels are prose, which no response repeats."""


def exact_match(rollouts: Sequence[Rollout]) -> list[float]:
    """Score 1.0 if the response equals the label, else 0.0. White space around both is ignored."""
    return [float(r.response.strip() == label_of(r).strip()) for r in rollouts]


def contains_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """Score 1.0 if the response contains the label as a separate word, else 0.0. Case is ignored.

    12 is found in `it is 12.` and in `x=12`, but not in 112, 12.5, 3.12, -12 or 1/12. Letters of
    scripts without spaces (Chinese, Japanese, Thai, ...) do not extend the word next to them.
    """
    return [float(_stands_in(label_of(r).strip(), r.response)) for r in rollouts]


def number_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """Score 1.0 if the answer is the label's number, else 0.0. 1,234.0 equals 1234.

    Without `####` or a box, the answer is the last number that stands alone in the response.
    """
    return [float(_is_number(r)) for r in rollouts]


def graded_number_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """Score like `number_answer`, with 0.1 for a wrong answer after `####` or in a box."""
    return [1.0 if _is_number(r) else FORM_CREDIT * has_answer(r.response) for r in rollouts]


def answer_format(rollouts: Sequence[Rollout]) -> list[float]:
    """Score 1.0 if the response gives an answer after `####` or in a box, else 0.0."""
    return [float(has_answer(r.response)) for r in rollouts]


def thinking_format(rollouts: Sequence[Rollout]) -> list[float]:
    """Score 1.0 if the response is `<think>...</think>` followed by an answer, else 0.0.

    If the prompt ends with `<think>`, as with some chat templates, the response must not repeat it.

    Paper: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2.
    """
    return [float(_thinks_first(r)) for r in rollouts]


def final_answer(text: str) -> str | None:
    r"""Return the answer of a solution: from its last `\boxed{}`, else after its last `####`.

    None means that the solution has no answer in either form. A box that is cut off is empty.
    """
    *_, box = [None, *_BOX.finditer(text)]
    if box:
        return _balanced(text[box.end() :]) or "" if box[1] == "{" else box[1]
    _, marker, behind = text.rpartition("####")
    line = behind.strip().split("\n")[0].strip()
    return line if marker and line else None


def has_answer(text: str) -> bool:
    """Return True if a solution gives an answer after `####` or in a box."""
    return bool(final_answer(text))


def label_of(rollout: Rollout) -> str:
    """Return the label as text.

    Raises:
        ValueError: the label is not a text, number or date, or it is empty.
    """
    return _text_of(rollout.label, f"row {rollout.prompt_index}")


def _text_of(label: Any, where: str) -> str:
    if label is None:
        raise ValueError(
            f"data.label_key: the prompt of {where} has no label. Set data.label_key to the column "
            "of the answers."
        )
    is_missing = isinstance(label, float | Decimal | np.floating) and not math.isfinite(label)
    is_plain = isinstance(label, str | Number | np.generic | date | time) and not is_missing
    text = str(label) if is_plain else ""
    if not text.strip():
        raise ValueError(
            f"data.label_key: the label of {where} is {_short(label)}. A label must be a number "
            "or a text that is not empty. Correct the row or remove it, or set data.label_key "
            "to the column of the answers."
        )
    return text


def _number_of(label: Any, where: str) -> Fraction:
    text = _text_of(label, where)
    number = parse_number(final_answer(text) or text)
    if number is None:
        raise ValueError(
            f"data.label_key: the label of {where} is not a number: {_short(text)}. Correct the "
            "row or remove it, or set reward.function to "
            "raypo.rewards.math_verifiers:math_answer, which reads formulas too."
        )
    return number


def formula_of(label: Any, where: str) -> str:
    """Return the answer of a label as text: a formula, a number or a few words.

    Raises:
        ValueError: the answer has more than `MAX_WORDS` words and no formula, or the label is not
            a string, number or date.
    """
    text = _text_of(label, where)
    text = final_answer(text) or text
    if len(text.split()) > MAX_WORDS and is_words(plain_words(text)):
        raise ValueError(
            f"data.label_key: the label of {where} is prose: {_short(text)}. A label must be a "
            f"formula, a number or at most {MAX_WORDS} words. Correct the row or remove it, or "
            "set data.label_key to the column of the answers."
        )
    return text


def entry_of(label: Any, where: str) -> dict[str, Any]:
    """Return the label after checking that it is an entry of a reasoning-gym data set.

    Raises:
        ValueError: the label is not such an entry.
    """
    metadata = label.get("metadata") if isinstance(label, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("source_dataset"), str):
        raise ValueError(
            f"data.label_key: the label of {where} is not an entry of reasoning-gym. Set "
            "data.prompts to reasoning_gym://TASK and data.label_key to entry."
        )
    return label


def plain_words(text: str) -> str:
    """Return a text without the LaTeX, spaces and capitals that only change its appearance."""
    text = re.sub(r"\\(?:text\w*|mathrm|mathbf)\s?\{([^{}]*)\}", r"\1", text.strip().strip("$"))
    return " ".join(text.split()).removesuffix(".").casefold()


def is_words(text: str) -> bool:
    """Return True if a text has only words, at least one of which has three letters or more.

    A text without such a word is taken for a formula: `xy` is x times y.
    """
    words = re.split(r"[,.]?\s|'", text)
    return max(map(len, words)) > 2 and all(re.fullmatch(r"[^\W\d_]+", word) for word in words)


LABEL_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    f"raypo.rewards.{name}": check
    for name, check in {
        "verifiers:exact_match": _text_of,
        "verifiers:contains_answer": _text_of,
        "verifiers:number_answer": _number_of,
        "verifiers:graded_number_answer": _number_of,
        "math_verifiers:math_answer": formula_of,
        "math_verifiers:graded_math_answer": formula_of,
        "gym_verifiers:reasoning_gym_score": entry_of,
    }.items()
}
"""Checks of labels, by the import path of the reward function that reads them. A check takes a
label and its location in the data (for messages). It raises ValueError if the function cannot read
the label."""


def _stands_in(label: str, response: str) -> bool:
    if parse_number(label) is not None:
        wanted, *_ = [*numbers_in(label), None]
        return wanted is not None and any(
            number.text.lower() == wanted.text.lower() for number in numbers_in(response)
        )
    by_itself = rf"(?<!{WORD})(?<!\d[.,]){re.escape(label)}(?!{WORD})(?![.,]\d)"
    return re.search(by_itself, response, re.IGNORECASE) is not None


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s$\\{}]+)")


def _balanced(text: str) -> str | None:
    """Return the text before the brace that closes an already open one.

    The result is None if the open brace is never closed.
    """
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:index].strip()
    return None


def _thinks_first(rollout: Rollout) -> bool:
    text = rollout.response.strip()
    if not rollout.prompt.rstrip().endswith("<think>"):
        if not text.startswith("<think>"):
            return False
        text = text.removeprefix("<think>")
    thought, _, answer = text.partition("</think>")
    has_tags = any(tag in part for tag in ("<think>", "</think>") for part in (thought, answer))
    return bool(thought.strip() and answer.strip()) and not has_tags


def _is_number(rollout: Rollout) -> bool:
    wanted = _number_of(rollout.label, f"row {rollout.prompt_index}")
    final = final_answer(rollout.response)
    if final is not None:
        return {number.value for number in numbers_in(final)} == {wanted}
    prose = re.sub(r"!(?!\S)", ".", rollout.response)  # a sentence's "!" is no factorial
    last = next(numbers_in(prose), None)
    return last is not None and last.value == wanted


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
