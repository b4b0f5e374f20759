"""Endless seeded shuffling of one or several sources, resumable at any position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from raypo.seeds import SeedWord

Item = TypeVar("Item")
Other = TypeVar("Other")


@dataclass(frozen=True)
class Mix:
    """Sizes and weights of concatenated sources."""

    sizes: tuple[int, ...]
    """Number of items of each source. No source is empty."""
    weights: tuple[float, ...]
    """Sampling weights; only their ratios matter."""
    block: int
    """Number of draws in a block, such as those of a step. The order of the sources is shuffled
    within each block. Each source has its share of every block, give or take one or two draws."""


class ShuffledStream(Generic[Item]):
    """Endless draws from items: each epoch is a permutation seeded by (seed, epoch).

    The draws depend only on the items, the seed and the position, not on how many are taken
    at once. Example: with 3 items and two calls of `take(2)`, the second call crosses into epoch 1.

    With a mix, each source has its own epochs. At the end of every block, each source has had its
    share of all draws so far, rounded. Example: with weights 0.75 and 0.25, the first 10 draws are
    8 and 2, and the first 20 draws are 15 and 5.
    """

    def __init__(self, items: Sequence[Item], *, seed: int, mix: Mix | None = None) -> None:
        if not len(items):
            raise ValueError("a stream needs at least one item, but it got none.")
        self.items = items
        """The items in their original order."""
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
        """Return a new stream, at position 0, that draws the same indices from other items."""
        return ShuffledStream(items, seed=self._seed, mix=self._mix)

    def take(self, count: int) -> list[tuple[int, Item]]:
        """Return the next (position, item) pairs, crossing epochs as needed."""
        positions = range(self._position, self._position + count)
        self._position += count
        return [(position, self._at(position)) for position in positions]

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the number of items taken since the start of the run."""
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        self._position = int(state["position"])

    def _at(self, position: int) -> Item:
        source, turn = self._turns.at(position) if self._turns else (0, position)
        return self.items[self._sources[source].place(turn)]


class _Source:
    """One source's range of the items, and its permutation."""

    def __init__(self, begin: int, size: int, seed: tuple[int, int]) -> None:
        self._begin, self._size = begin, size
        self._seed, self._number = seed
        self._epoch = -1  # epoch of the cached permutation
        self._order: np.ndarray = np.empty(0, np.int64)  # [size] int64

    def place(self, turn: int) -> int:
        """Return the index, among all items, of the item that this source's draw `turn` takes."""
        epoch, offset = divmod(turn, self._size)
        if epoch != self._epoch:
            words = [SeedWord.PROMPT_ORDER, self._seed, epoch] + (
                [self._number] if self._number else []
            )
            self._epoch, self._order = epoch, np.random.default_rng(words).permutation(self._size)
        return self._begin + int(self._order[offset])


class _Turns:
    """Source of each draw. To keep all shares, draw n of a source is due at (n + 1/2) / weight."""

    def __init__(self, mix: Mix, seed: int) -> None:
        self._mix, self._seed = mix, seed
        self._number = -1  # index of the cached block
        self._block: list[tuple[int, int]] = []

    def at(self, position: int) -> tuple[int, int]:
        """Return the source of a draw, and the number of earlier draws from this source."""
        number, offset = divmod(position, self._mix.block)
        if number != self._number:
            counts = self._counts(number * self._mix.block)
            drawn = []
            for source in self._due(counts, self._mix.block):
                drawn.append((source, counts[source]))
                counts[source] += 1
            order = np.random.default_rng([SeedWord.SOURCE_ORDER, self._seed, number])
            self._block = [drawn[place] for place in order.permutation(len(drawn))]
            self._number = number
        return self._block[offset]

    def _counts(self, draws: int) -> list[int]:
        """Return the number of draws from each source among the first `draws`."""
        weights = self._mix.weights
        sure = max(draws - len(weights), 0) / sum(weights)
        # A lower bound for each source, so that only the few draws beyond it need sorting.
        counts = [max(int(weight * sure - 0.5), 0) for weight in weights]
        for source in self._due(counts, draws - sum(counts)):
            counts[source] += 1
        return counts

    def _due(self, counts: list[int], draws: int) -> list[int]:
        """Return the sources of the next `draws` draws. `counts` are earlier draws by source."""
        due = np.concatenate(
            [
                (count + np.arange(draws) + 0.5) / weight
                for count, weight in zip(counts, self._mix.weights, strict=True)
            ]
        )
        first = np.argsort(due, kind="stable")[:draws]
        return (first // draws).tolist() if draws else []
