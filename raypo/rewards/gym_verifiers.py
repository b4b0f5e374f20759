"""Scores of `reasoning-gym` tasks, computed by each task's own verifier.

The prompts come from `data.prompts: reasoning_gym://chain_sum?size=2000`; the label is the whole
entry (`data.label_key: entry`). The module needs `pip install raypo[math]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypo.config import ConfigError
from raypo.rewards.verifiers import entry_of, final_answer
from raypo.types import Rollout

try:
    import reasoning_gym
except ImportError as error:
    raise ConfigError(
        f"raypo.rewards.gym_verifiers: needs the package reasoning-gym ({error}). "
        "pip install 'raypo[math]' on every node."
    ) from None


def reasoning_gym_score(rollouts: Sequence[Rollout]) -> list[float]:
    """Score each answer from 0.0 to 1.0 with its task's verifier. Many give partial credit.

    The answer is in the last box or after the last `####`, or else it is the whole response.
    """
    return [_score(rollout) for rollout in rollouts]


def _score(rollout: Rollout) -> float:
    entry = entry_of(rollout.label, f"row {rollout.prompt_index}")
    answer = final_answer(rollout.response) or rollout.response.strip()
    # Any, because reasoning-gym annotates the returned function as one without arguments.
    score: Any = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score(answer, entry))
