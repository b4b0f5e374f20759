"""Reward functions that compare formulas with `math-verify`: LaTeX, intervals, sets, units.

They need `pip install raypo[math]`. Sympy may never finish a hostile formula, so runs that sample
from a large model should set `reward.processes` and `reward.timeout_s`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from raypo.config import ConfigError
from raypo.rewards.numbers import parse_number
from raypo.rewards.verifiers import (
    FORM_CREDIT,
    final_answer,
    formula_of,
    has_answer,
    is_words,
    plain_words,
)
from raypo.types import Rollout

try:
    import math_verify
    import sympy
except ImportError as error:
    raise ConfigError(
        f"raypo.rewards.math_verifiers: needs the package math-verify ({error}). "
        "pip install 'raypo[math]' on every node."
    ) from None

# math-verify would warn at each call that it has no timeout. Its own timeout works only in the main
# thread, so it is not used.
logging.getLogger("math_verify").setLevel(logging.ERROR)


_PRECISION = 100
"""Number of digits to which numbers other than fractions are compared."""
_ROUNDING = 5e-6
"""Largest relative error of a decimal that stands for a number with infinitely many decimals."""


def math_answer(rollouts: Sequence[Rollout]) -> list[float]:
    r"""Score 1.0 if the answer equals the label mathematically, as 0.5 equals \frac{1}{2}, else 0.

    The answer is in the last box or after the last `####`. Without either, it is the last formula
    or number of the response. Numbers are compared exactly, with one exception: a decimal may round
    a number that has infinitely many decimals (0.333333 for \frac{1}{3}). Words, lists with dots
    (`1, 2, \ldots`), and formulas that math-verify cannot read are compared as text. Such an
    answer must be in a box or after `####`, or be the whole response.
    """
    return [float(_is_right(rollout)) for rollout in rollouts]


def graded_math_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """Score like `math_answer`, with 0.1 for a wrong answer after `####` or in a box."""
    return [1.0 if _is_right(r) else FORM_CREDIT * has_answer(r.response) for r in rollouts]


def _is_right(rollout: Rollout) -> bool:
    label = formula_of(rollout.label, f"row {rollout.prompt_index}")
    final = final_answer(rollout.response)
    words = plain_words(label)
    answer = plain_words(rollout.response if final is None else final)
    if words == answer:
        return True
    wanted = _parsed(_boxed(label))
    if not wanted or _is_text(words) or (final is not None and _is_text(answer)):
        return False
    parsed = _parsed(rollout.response if final is None else _boxed(final))
    if wanted and parsed and _is_number(wanted[0]) and _is_number(parsed[0]):
        return _is_same_number(_evaluated(wanted[0]), _evaluated(parsed[0]))
    return math_verify.verify(
        wanted,
        parsed,
        float_rounding=12,
        numeric_precision=_PRECISION,
        timeout_seconds=None,
    )


def _is_text(text: str) -> bool:
    """Return True if math-verify would misread a text.

    math-verify reads a word as a product of its letters, and ignores dots.
    """
    return is_words(text) or re.search(r"\\[lcd]?dots|…|\.\.\.", text) is not None


def _is_number(value: Any) -> bool:
    # A percentage is left to math-verify, which accepts both 50 and 0.5 for 50%.
    is_plain = isinstance(value, sympy.Expr) and not value.has(sympy.UnevaluatedExpr)
    return is_plain and value.is_number is True


def _evaluated(number: Any) -> Any:
    """Return a sum or product of fractions as one fraction, if it is of moderate size."""
    if number.is_Rational or not number.is_rational:
        return number
    size = abs(number.evalf(15))
    return number.doit() if 1e-50 < size < 1e50 else number


def _is_same_number(wanted: Any, answer: Any) -> bool:
    are_fractions = wanted.is_Rational and answer.is_Rational
    if wanted == answer or (are_fractions and _is_decimal(wanted) == _is_decimal(answer)):
        return wanted == answer and wanted.is_finite is not False
    # Evaluate first: sympy may expand a power without bound in a symbolic difference.
    values = [number.evalf(_PRECISION) for number in (wanted, answer)]
    size, error = abs(values[0]), abs(values[0] - values[1])
    if not (size.is_finite and error.is_finite):  # 1/0 is no number
        return False
    is_rounded = any(_is_decimal(number) and not number.is_Integer for number in (wanted, answer))
    allowed = _ROUNDING if is_rounded else sympy.Float(f"1e-{_PRECISION - 10}", _PRECISION)
    return bool(error <= allowed * size)


def _is_decimal(number: Any) -> bool:
    """Return True if a number is a decimal, or a fraction with finitely many decimals."""
    if not number.is_Rational:
        return number.has(sympy.Float)
    rest = int(number.q)
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


@lru_cache(maxsize=4096)  # the samples of a prompt share their label
def _parsed(text: str) -> list[Any]:
    number = parse_number(final_answer(text) or text)
    if number is not None and "%" not in text:
        return [sympy.Rational(number.numerator, number.denominator)]
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
