"""An environment of the package verifiers, as its hub has them: `load_environment` makes it."""

from __future__ import annotations

from typing import Any

import verifiers as vf  # pyright: ignore[reportMissingImports]
from datasets import Dataset

NUMBERS = 8


class HigherLower(vf.MultiTurnEnv):
    """Find a number from 0 to 7; a wrong guess is answered with `>` (higher) or `<` (lower)."""

    @vf.stop
    async def is_found(self, state: Any) -> bool:
        """End the episode with the right guess."""
        return bool(guesses(state)) and guesses(state)[-1] == state["answer"]

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        """Answer a guess; what is no number is answered with `!`."""
        guess = guesses(state)[-1]
        answer = "!" if not guess.isdigit() else ">" if int(guess) < int(state["answer"]) else "<"
        return [{"role": "user", "content": answer}]


def guesses(state: Any) -> list[str]:
    """Return what the policy has said so far."""
    return [step["completion"][-1].content or "" for step in state["trajectory"]]


def found(state: Any) -> float:
    """Score 1 if the last guess is the number."""
    return float(guesses(state)[-1] == state["answer"])


def numbers(state: Any) -> float:
    """Score the share of the guesses that are numbers."""
    return sum(guess.isdigit() for guess in guesses(state)) / len(guesses(state))


def load_environment(most: int = 3) -> vf.Environment:
    """Return the game with `most` guesses."""
    ask = [{"role": "user", "content": "?"}]
    rows = [{"prompt": ask, "answer": str(number)} for number in range(NUMBERS)]
    return HigherLower(
        dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        rubric=vf.Rubric(funcs=[found, numbers], weights=[1.0, 0.1]),
        max_turns=most,
    )
