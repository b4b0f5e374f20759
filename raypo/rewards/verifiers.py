"""Ready-made reward functions: `reward.function: raypo.rewards.verifiers:exact_match`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypo.types import Rollout


def exact_match(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the response is the label, white space around them aside, else 0.0."""
    return [float(r.response.strip() == _label(r).strip()) for r in rollouts]


def contains_answer(rollouts: Sequence[Rollout]) -> list[float]:
    """1.0 where the label stands in the response by itself, else 0.0; case does not matter.

    By itself: 12 is found in `it is 12.` and in `x=12`, not in 112, 12.5 or 3.12.
    """
    return [float(_stands_in(_label(r).strip(), r.response)) for r in rollouts]


def _stands_in(label: str, response: str) -> bool:
    by_itself = rf"(?<!\w)(?<!\d[.,]){re.escape(label)}(?!\w)(?![.,]\d)"
    return bool(label) and re.search(by_itself, response, re.IGNORECASE) is not None


def _label(rollout: Rollout) -> str:
    if rollout.label is None:
        raise ValueError(
            f"the prompt of row {rollout.prompt_index} has no label. Set data.label_key to the "
            "column of the answers."
        )
    return str(rollout.label)
