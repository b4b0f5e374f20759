"""Reward functions that judge formulas as `math-verify` does: LaTeX, intervals, sets, units.

They need `pip install raypo[math]`. Sympy may never finish a hostile formula; a run that samples
from a large model gives them processes and a time limit (`reward.processes`, `reward.timeout_s`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from raypo.config import ConfigError
from raypo.rewards.verifiers import FORM_CREDIT, final_answer, has_answer, label_of
from raypo.types import Rollout

try:
    import math_verify
except ImportError as error:
    raise ConfigError(
        f"raypo.rewards.math_verifiers: needs the package math-verify ({error}). "
        "pip install 'raypo[math]' on every node."
    ) from None

# At each call it would warn that it has no limit: its own needs a process's main thread.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_answer(rollouts: Sequence[Rollout]) -> list[float]:
    r"""1.0 where the answer equals the label as mathematics, else 0.0: 0.5 is \frac{1}{2}.

    The answer stands in the last box or behind the last `####`; else it is the last formula or
    number of the response.
    """
    return [float(_is_right(rollout)) for rollout in rollouts]


def graded_math_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """As `math_answer`, with 0.1 for a wrong answer behind `####` or in a box."""
    return [1.0 if _is_right(r) else FORM_CREDIT * has_answer(r.response) for r in rollouts]


def _is_right(rollout: Rollout) -> bool:
    label = label_of(rollout)
    wanted = _parsed(_boxed(final_answer(label) or label))
    given = final_answer(rollout.response)
    found = _parsed(rollout.response if given is None else _boxed(given))
    return math_verify.verify(wanted, found, timeout_seconds=None)


def _boxed(answer: str) -> str:
    return f"$\\boxed{{{answer}}}$"


@lru_cache(maxsize=4096)  # the samples of a prompt share their label
def _parsed(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
