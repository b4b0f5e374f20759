"""Answer a task at once, or ask the calculator first: a call costs a tenth of a right answer."""

from typing import Any

from raypo.tools.calculator import calculator
from raypo.tools.calls import answer_calls

TOOLS = [calculator]  # any async functions; docs/tools.md
Observation = list[dict[str, str]] | None


class ToolUser:
    """Tool calls are answered; the first response without one is the answer to the task."""

    def __init__(self, call_cost: float = 0.1, *, silent: bool = False) -> None:
        """Begin an episode.

        Args:
            call_cost: What each response that calls a tool takes off the score.
            silent: Whether tools answer nothing; for the comparison.
        """
        self.call_cost, self.silent = call_cost, silent

    async def reset(self, prompt: Any, label: str) -> None:
        """The policy reads the prompt as it is."""
        self.answer = label

    async def step(self, action: str) -> tuple[Observation, float, bool]:
        """1 and the end for the right answer, 0 and the end for another one."""
        told = await answer_calls(action, TOOLS)
        if not told:
            return None, float(action.strip() == self.answer), True
        messages = [{"role": "tool", "content": "" if self.silent else text} for text in told]
        return messages, -self.call_cost, False
