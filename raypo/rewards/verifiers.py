r"""Ready-made reward functions: `reward.function: raypo.rewards.verifiers:exact_match`.

Answers and labels may be bare (`42`), end as GSM8K's solutions do (`#### 42`), or stand in a box as
MATH's do (`\boxed{42}`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from raypo.types import Rollout

FORM_CREDIT = 0.1
"""Score of a wrong answer that stands where an answer should."""
_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+")


def exact_match(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the response is the label, white space around them aside, else 0.0."""
    return [float(r.response.strip() == label_of(r).strip()) for r in rollouts]


def contains_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the label stands in the response by itself, else 0.0; case does not matter.

    By itself: 12 is found in `it is 12.` and in `x=12`, not in 112, 12.5 or 3.12.
    """
    return [float(_stands_in(label_of(r).strip(), r.response)) for r in rollouts]


def number_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the answer is the label's number, else 0.0; 1,234.0 is 1234.

    Without `####` or a box the last number of the response is its answer.
    """
    return [float(_is_number(r)) for r in rollouts]


def graded_number_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """As `number_answer`, with 0.1 for a wrong answer behind `####` or in a box."""
    return [1.0 if _is_number(r) else FORM_CREDIT * has_answer(r.response) for r in rollouts]


def answer_format(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the response gives an answer behind `####` or in a box, else 0.0."""
    return [float(has_answer(r.response)) for r in rollouts]


def thinking_format(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the response is `<think>...</think>` and an answer behind it, else 0.0.

    Paper: DeepSeek-AI 2025, arXiv:2501.12948, section 2.2.2.
    """
    form = re.compile(
        r"\s*<think>(?:(?!</?think>).)+</think>\s*(?:(?!</?think>).)*\S\s*", re.DOTALL
    )
    return [float(form.fullmatch(r.response) is not None) for r in rollouts]


def final_answer(text: str) -> str | None:
    r"""What a solution gives as its answer: in its last `\boxed{}`, else behind its last `####`."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        first = start + len("\\boxed{")
        return _balanced(text[first:])
    _, marker, behind = text.rpartition("####")
    line = behind.strip().split("\n")[0].strip()
    return line if marker and line else None


def has_answer(text: str) -> bool:
    """Whether a solution gives an answer behind `####` or in a box."""
    return bool(final_answer(text))


def label_of(rollout: Rollout) -> str:
    """The label as text.

    Raises:
        ValueError: there is none.
    """
    if rollout.label is None:
        raise ValueError(
            f"the prompt of row {rollout.prompt_index} has no label. Set data.label_key to the "
            "column of the answers."
        )
    return str(rollout.label)


def _stands_in(label: str, response: str) -> bool:
    by_itself = rf"(?<!\w)(?<!\d[.,]){re.escape(label)}(?!\w)(?![.,]\d)"
    return bool(label) and re.search(by_itself, response, re.IGNORECASE) is not None


def _balanced(text: str) -> str | None:
    """The text up to the brace that closes one before it; None where it stays open."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:place].strip()
    return None


def _is_number(rollout: Rollout) -> bool:
    label = label_of(rollout)
    try:
        wanted = _decimal((final_answer(label) or label).strip(" $%"))
    except InvalidOperation:
        raise ValueError(
            f"the label of row {rollout.prompt_index} is no number: {label!r}. Set reward.function "
            "to raypo.rewards.math_verifiers:math_answer, which reads formulas too."
        ) from None
    given = final_answer(rollout.response)
    numbers = _NUMBER.findall(rollout.response if given is None else given)
    return bool(numbers) and _decimal(numbers[-1]) == wanted


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))
