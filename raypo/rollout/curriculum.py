"""Choose prompts by their predicted pass rate (`data.curriculum`).

The pass rate of each prompt has a Beta posterior. For every block of draws (those of one step), a
rate is sampled from each posterior, and the prompts whose rates are closest to the target are
drawn. This is Thompson sampling, so prompts about which little is known are tried too.

Paper: Qu et al. 2025 (MoPPS), arXiv:2507.04632, with all prompts as candidates.

The prompts of a block depend only on the seed and on the outcomes of draws that lie at least `lag`
before the block. They depend neither on timing nor on how many draws are taken at once. A resumed
run, and a run that samples ahead of the update, thus draw the same prompts for the same outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from raypo.config import CurriculumSection
from raypo.data.stream import Mix, ShuffledStream
from raypo.rollout.collect import samples_of
from raypo.seeds import SeedWord
from raypo.types import Prompt, Rollout

_PRIOR = 1.0
"""Both parameters of the Beta prior, which is uniform."""
_QUANTILES = (0.1, 0.5, 0.9)
_DIGESTED = 1000
"""Maximum number of prompts in the checksum that tells other prompts of the same number apart."""


class Outcome(NamedTuple):
    """Number of one draw's samples that passed and that failed. Samples without a score are left
    out."""

    passed: int
    failed: int


def few_draws_note(num_prompts: int, num_draws: int) -> str | None:
    """Return a note for the user if a run is too short to learn pass rates, else None.

    Args:
        num_prompts: Number of prompts to choose from.
        num_draws: Number of prompts that the whole run draws.
    """
    if num_draws > num_prompts:
        return None
    return (
        f"data.curriculum: has little data to learn from: the run draws {num_draws} prompts "
        f"(num_steps x rollout.prompts_per_step) and data.prompts has {num_prompts}, so most "
        "prompts have no pass rate yet when they are chosen; give fewer prompts or more steps, "
        "or remove it"
    )


class CurriculumStream(ShuffledStream[Prompt]):
    """Endless draws of the prompts whose predicted pass rate is closest to the target.

    `mix` determines each source's share of the draws; the curriculum chooses prompts within each
    source. A block contains no prompt twice unless its source has too few prompts. Only one thread
    at a time may use the stream.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        section: CurriculumSection,
        *,
        seed: int,
        block: int,
        mix: Mix | None = None,
        lag: int = 0,
    ) -> None:
        """Start with the prior for all prompts.

        Args:
            prompts: The prompts, source by source.
            section: The section `data.curriculum` of the config.
            seed: Seed of the run.
            block: Number of draws that are chosen together.
            mix: Sizes and weights of the sources. None means a single source.
            lag: Number of draws directly before each block that the block ignores. They may still
                be in flight when the prompts of the block are chosen.
        """
        super().__init__(prompts, seed=seed, mix=mix)
        self._section, self._block, self._lag = section, block, lag
        self._begins = np.cumsum([0, *(mix.sizes if mix else (len(prompts),))])
        self._origin = 0  # a block begins at this draw, and every `block` draws from it
        self._counts = np.full((2, len(prompts)), _PRIOR)  # Beta parameters: passed, failed
        self._settled = 0  # all draws before this one are in `_counts`
        # The index of a prompt is that in `items`.
        # Prompt index and outcome of each later draw.
        self._outcomes: dict[int, tuple[int, Outcome]] = {}
        self._open: dict[int, int] = {}  # draw without an outcome yet -> prompt index
        self._chosen: tuple[int, list[int]] = (-1, [])  # newest block: first draw, indices

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Return the next (position, prompt) pairs, and remember them until `learn`."""
        draws = range(self._position, self._position + count)
        indices = {draw: self._index_of(draw) for draw in draws}
        self._open |= indices
        self._position += count
        return [(draw, self.items[index]) for draw, index in indices.items()]

    def learn(self, outcomes: Mapping[int, Outcome], until: int) -> None:
        """Record the outcomes of all draws before `until`.

        A draw without scored samples does not change the estimate of its prompt.

        Args:
            outcomes: Outcomes of all workers, by draw.
            until: The first draw that has no outcome yet.
        """
        for draw in [draw for draw in self._open if draw < until]:
            self._outcomes[draw] = self._open.pop(draw), outcomes.get(draw, Outcome(0, 0))

    def outcomes(self, scored: Sequence[Rollout]) -> dict[int, Outcome]:
        """Return the outcomes of some samples, by draw. Samples without a score do not count."""
        outcomes: dict[int, Outcome] = {}
        for sample in samples_of(list(scored)):
            if math.isfinite(sample.score):
                passed, failed = outcomes.get(sample.group_index, Outcome(0, 0))
                passes = sample.score >= self._section.pass_score
                outcomes[sample.group_index] = Outcome(passed + passes, failed + (not passes))
        return outcomes

    def settled(self, draw: int) -> dict[str, float]:
        """Add old outcomes to the counts of their prompts, and return metrics.

        An outcome is old if no later block of draws and no checkpoint needs it separately.

        Args:
            draw: Index of the first draw after the current step.

        Returns:
            The fraction of all prompts that were sampled before the draw, and quantiles of their
            mean pass rates.
        """
        counts = self._counts_before(draw)
        passed, failed = counts[:, (counts != _PRIOR).any(0)]
        limit = self._block_of(draw) - self._lag
        self._counts = self._counts_before(limit)
        self._settled = max(self._settled, limit)
        self._outcomes = {
            draw: outcome for draw, outcome in self._outcomes.items() if draw >= limit
        }
        metrics = {"curriculum/seen_fraction": len(passed) / len(self.items)}
        if len(passed):
            rates = np.quantile(passed / (passed + failed), _QUANTILES)
            for share, rate in zip(_QUANTILES, rates.tolist(), strict=True):
                metrics[f"curriculum/pass_rate_p{share * 100:.0f}"] = rate
        return metrics

    def state_dict(self, at: int | None = None) -> dict[str, Any]:
        """Return the state before draw `at`.

        `settled` must not have merged the outcome of that draw or of a later one. With `at` None,
        the state is only the position of the next draw, without the curriculum.
        """
        state = super().state_dict()
        return state if at is None else {"position": at} | {"curriculum": self._state(at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Estimates from a run with other prompts are ignored.
        """
        super().load_state_dict(state)
        at = self._settled = self._origin = int(state["position"])
        self._counts = np.full_like(self._counts, _PRIOR)
        self._outcomes, self._open, self._chosen = {}, {}, (-1, [])
        saved = state.get("curriculum")
        if saved is None or saved["prompts"] != self._prompts_digest:
            return
        for index, *counts in saved["counts"]:
            self._counts[:, index] = counts
        self._settled = saved["settled"]
        self._outcomes = {
            draw: (index, Outcome(*outcome)) for draw, index, *outcome in saved["outcomes"]
        }
        if (saved["block"], saved["lag"]) == (self._block, self._lag):
            self._origin = saved["origin"]
            return
        # The block size or lag has changed: a block begins at the next draw, and the outcomes of
        # all draws before it are used.
        self._outcomes = {draw: outcome for draw, outcome in self._outcomes.items() if draw < at}

    def _state(self, at: int) -> dict[str, Any]:
        (seen,) = np.nonzero((self._counts != _PRIOR).any(0))
        return {
            "prompts": self._prompts_digest,
            "block": self._block,
            "lag": self._lag,
            "origin": self._origin,
            "settled": self._settled,
            "counts": [[index, *self._counts[:, index].tolist()] for index in seen.tolist()],
            "outcomes": [
                [draw, index, *outcome]
                for draw, (index, outcome) in sorted(self._outcomes.items())
                if draw < at
            ],
        }

    @cached_property
    def _prompts_digest(self) -> list[int]:
        """Return the number of prompts, and a checksum of some of them, spread over all."""
        count = len(self.items)
        some = [self.items[index] for index in range(0, count, -(-count // _DIGESTED))]
        return [count, crc32(b"".join(prompt.token_ids.tobytes() for prompt in some))]

    def _block_of(self, draw: int) -> int:
        """Return the first draw of the block that contains a draw."""
        return draw - (draw - self._origin) % self._block

    def _index_of(self, draw: int) -> int:
        """Return the index of a draw's prompt."""
        first = self._block_of(draw)
        if self._chosen[0] != first:
            self._chosen = first, self._choice(first)
        return self._chosen[1][draw - first]

    def _choice(self, first: int) -> list[int]:
        """Choose the prompts of the block that begins at draw `first`, and return their indices."""
        rates = np.random.default_rng([SeedWord.CURRICULUM, self._seed, first]).beta(
            *self._counts_before(first - self._lag)
        )
        distances = np.abs(rates - self._section.target)
        draws = range(first, first + self._block)
        sources = np.array([self._turns.at(draw)[0] if self._turns else 0 for draw in draws])
        indices = np.empty(self._block, np.int64)
        for source in set(sources.tolist()):
            begin, end = self._begins[source : source + 2]
            count = int((sources == source).sum())
            closest = begin + np.argsort(distances[begin:end], kind="stable")[:count]
            indices[sources == source] = np.resize(closest, count)  # repeats if there are too few
        return indices.tolist()

    def _counts_before(self, limit: int) -> np.ndarray:
        """Return the Beta parameters, [2, N], given the outcomes of all draws before a limit."""
        counts, memory = self._counts.copy(), self._section.memory
        for draw in range(self._settled, limit):
            assert draw in self._outcomes, f"draw {draw} has no outcome yet"
            index, outcome = self._outcomes[draw]
            if any(outcome):
                faded = memory * counts[:, index] + (1.0 - memory) * _PRIOR
                counts[:, index] = faded + outcome
        return counts
