"""Which prompts come when: endless seeded draws that resume at any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from raypo.types import Prompt

Item = TypeVar("Item")

_SEED_WORD = 1
"""First of the numbers that seed a permutation here; dealing has 2, the learner 3, requests 4."""


@dataclass(frozen=True)
class Draw:
    """One prompt drawn; its samples are a group."""

    group_index: int
    """Which draw of the run, from 0."""
    prompt: Prompt


class ShuffledStream(Generic[Item]):
    """Draws items without end: each epoch is a permutation of its own from seed and epoch.

    The draws depend on the items, the seed and the position only, never on how many are taken
    at once. Example: 3 items, `take(2)` then `take(2)`: the second crosses into epoch 1.
    """

    def __init__(self, items: Sequence[Item], *, seed: int) -> None:
        if not items:
            raise ValueError("a stream needs at least one item, it got none.")
        self.items = items
        """What is drawn from, in its own order."""
        self._seed = seed
        self._position = 0
        self._epoch = -1  # of the permutation at hand
        self._order: np.ndarray = np.empty(0, np.int64)  # [items] int64

    def take(self, count: int) -> list[tuple[int, Item]]:
        """The next items with their positions, over as many epochs as it needs."""
        positions = range(self._position, self._position + count)
        self._position += count
        return [(position, self._at(position)) for position in positions]

    def state_dict(self) -> dict[str, int]:
        """The position: items taken since the start of the run."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position."""
        self._position = int(state["position"])

    def _at(self, position: int) -> Item:
        epoch, offset = divmod(position, len(self.items))
        if epoch != self._epoch:
            generator = np.random.default_rng([_SEED_WORD, self._seed, epoch])
            self._epoch, self._order = epoch, generator.permutation(len(self.items))
        return self.items[self._order[offset]]


class PromptStream:
    """A shuffled stream of prompts; each draw is a group of its own."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        self._stream = ShuffledStream(prompts, seed=seed)

    def take(self, count: int) -> list[Draw]:
        """The next draws, over as many epochs as it needs."""
        return [Draw(position, prompt) for position, prompt in self._stream.take(count)]

    def state_dict(self) -> dict[str, int]:
        """The position: draws taken since the start of the run."""
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position."""
        self._stream.load_state_dict(state)
