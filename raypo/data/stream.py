"""Which prompts come when: endless seeded draws of one or several sources, resumed anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from raypo.types import Prompt

Item = TypeVar("Item")
Other = TypeVar("Other")

_SEED_WORD = 1
"""First of the numbers that seed a permutation here; dealing has 2, the learner 3, requests 4."""
_MIX_SEED_WORD = 6
"""The same of the order of sources; 5 is in `rollout.experience`."""


@dataclass(frozen=True)
class Draw:
    """One prompt drawn; its samples are a group."""

    group_index: int
    """Which draw of the run, from 0."""
    prompt: Prompt


@dataclass(frozen=True)
class Mix:
    """Sources whose items lie one behind the other, and the share of each in what is drawn."""

    sizes: tuple[int, ...]
    """Items of each source, at least one."""
    weights: tuple[float, ...]
    """In proportion to the shares."""
    block: int
    """Draws among which sources come in a seeded order, such as those of a step: it has the share
    of each source, to one draw or two."""


class ShuffledStream(Generic[Item]):
    """Draws items without end: each epoch is a permutation of its own from seed and epoch.

    The draws depend on the items, the seed and the position only, never on how many are taken
    at once. Example: 3 items, `take(2)` then `take(2)`: the second crosses into epoch 1.

    With a mix each source has epochs of its own. Of all draws up to the end of any block a source
    has its share, rounded: 10 draws with the weights 0.75 and 0.25 are 8 and 2, 20 are 15 and 5.
    """

    def __init__(self, items: Sequence[Item], *, seed: int, mix: Mix | None = None) -> None:
        if not len(items):
            raise ValueError("a stream needs at least one item, it got none.")
        self.items = items
        """What is drawn from, in its own order."""
        sizes = mix.sizes if mix else (len(items),)
        begins = accumulate(sizes, initial=0)
        self._sources = [
            _Source(begin, size, (seed, number))
            for number, (begin, size) in enumerate(zip(begins, sizes, strict=False))
        ]
        self._seed, self._mix = seed, mix
        self._turns = _Turns(mix, seed) if mix else None
        self._position = 0

    def of(self, items: Sequence[Other]) -> ShuffledStream[Other]:
        """A stream from the start that draws the same places of other items."""
        return ShuffledStream(items, seed=self._seed, mix=self._mix)

    def take(self, count: int) -> list[tuple[int, Item]]:
        """The next items with their positions, over as many epochs as it needs."""
        positions = range(self._position, self._position + count)
        self._position += count
        return [(position, self._at(position)) for position in positions]

    def state_dict(self) -> dict[str, int]:
        """The position: items taken since the start of the run."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on at a position."""
        self._position = int(state["position"])

    def _at(self, position: int) -> Item:
        source, turn = self._turns.at(position) if self._turns else (0, position)
        return self.items[self._sources[source].place(turn)]


class _Source:
    """One source's items among all, and their order."""

    def __init__(self, begin: int, size: int, seed: tuple[int, int]) -> None:
        self._begin, self._size = begin, size
        self._seed, self._number = seed
        self._epoch = -1  # of the permutation at hand
        self._order: np.ndarray = np.empty(0, np.int64)  # [size] int64

    def place(self, turn: int) -> int:
        """The place among all items of its draw with this number."""
        epoch, offset = divmod(turn, self._size)
        if epoch != self._epoch:
            words = [_SEED_WORD, self._seed, epoch] + ([self._number] if self._number else [])
            self._epoch, self._order = epoch, np.random.default_rng(words).permutation(self._size)
        return self._begin + int(self._order[offset])


class _Turns:
    """The source of each draw: its draw n is due at (n + 1/2) / weight, which keeps all shares."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix, self._seed = mix, seed
        self._number = -1  # of the block at hand
        self._block: list[tuple[int, int]] = []

    def at(self, position: int) -> tuple[int, int]:
        """The source of a draw, and how many draws it had before."""
        number, offset = divmod(position, self._mix.block)
        if number != self._number:
            counts = self._counts(number * self._mix.block)
            drawn = []
            for source in self._due(counts, self._mix.block):
                drawn.append((source, counts[source]))
                counts[source] += 1
            order = np.random.default_rng([_MIX_SEED_WORD, self._seed, number])
            self._block = [drawn[place] for place in order.permutation(len(drawn))]
            self._number = number
        return self._block[offset]

    def _counts(self, draws: int) -> list[int]:
        """How many of the first draws are of each source."""
        weights = self._mix.weights
        sure = max(draws - len(weights), 0) / sum(weights)
        counts = [max(int(weight * sure - 0.5), 0) for weight in weights]
        for source in self._due(counts, draws - sum(counts)):
            counts[source] += 1
        return counts

    def _due(self, counts: list[int], draws: int) -> list[int]:
        """The sources of the next draws, where each has had so many."""
        due = np.concatenate(
            [
                (count + np.arange(draws) + 0.5) / weight
                for count, weight in zip(counts, self._mix.weights, strict=True)
            ]
        )
        first = np.argsort(due, kind="stable")[:draws]
        return (first // draws).tolist() if draws else []
