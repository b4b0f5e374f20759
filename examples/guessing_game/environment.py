"""Find a number from 0 to 7 in three guesses; every wrong one is answered with higher or lower."""

from typing import Any


class GuessingGame:
    """One token a turn: a guess of the policy, an answer of the game.

    Three guesses of eight numbers hit in 3 of 8 games unless the answers are read; who halves what
    is left after each of them hits in 7 of 8.
    """

    def __init__(self, guesses: int = 3, *, answers: bool = True) -> None:
        """Begin a game.

        Args:
            guesses: How many there are.
            answers: Whether a wrong guess is told which way to go; for the comparison.
        """
        self.left, self.answers = guesses, answers

    async def reset(self, prompt: str, label: Any) -> None:
        """The number to find is the row's label; the policy reads the prompt as it is."""
        self.number = int(label)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """1 and the end for a hit; `>` for higher, `<` for lower, `!` for what is no number."""
        self.left -= 1
        if action == str(self.number):
            return "", 1.0, True
        way = ">" if action.isdigit() and int(action) < self.number else "<"
        answer = way if action.isdigit() and self.answers else "!"
        return answer, 0.0, self.left == 0
