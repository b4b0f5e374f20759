"""Uses of a run's seed."""

from __future__ import annotations

from enum import IntEnum


class SeedWord(IntEnum):
    """First number of each seed sequence that is derived from a run's seed, by use.

    Sequences with different first numbers are independent, so one use of the seed does not affect
    the random draws of another. The numbers must never change, because a resumed run would then
    draw different prompts.
    """

    PROMPT_ORDER = 1
    """Order of the rows of a source in an epoch."""
    SHARDING = 2
    """Assignment of groups to minibatches and workers."""
    MINIBATCH_ORDER = 3
    """Order of the minibatches in an epoch of a step."""
    REQUEST = 4
    """Sampling of a response."""
    COVARIANCE = 5
    """Selection of the tokens that clip_cov clips."""
    SOURCE_ORDER = 6
    """Order of the sources in a mix."""
    CURRICULUM = 8
    """Pass rates drawn by the curriculum. The number 7 is not used."""
