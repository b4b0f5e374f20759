"""The uses of a run's seed."""

from __future__ import annotations

from enum import IntEnum


class SeedWord(IntEnum):
    """First number of every seed sequence that is derived from a run's seed, by use.

    Sequences with different first numbers are independent, so a use of the seed cannot change the
    draws of another. A number must never change: a resumed run would draw other prompts.
    """

    PROMPT_ORDER = 1
    """Order of the rows of a source in an epoch."""
    SHARDING = 2
    """Minibatch and worker of each group."""
    MINIBATCH_ORDER = 3
    """Order of the minibatches in an epoch of a step."""
    REQUEST = 4
    """Sampling of a response."""
    COVARIANCE = 5
    """Tokens that clip_cov restricts."""
    SOURCE_ORDER = 6
    """Order of the sources in a mix."""
    CURRICULUM = 8
    """Pass rates that the curriculum draws. The number 7 is not used."""
