"""How positive a text is, by the lexicon of VADER."""

from __future__ import annotations

import functools
from typing import Any

from raypo import Rollout


def positive(rollouts: list[Rollout]) -> list[float]:
    """VADER's compound score of each response, -1 to 1; an empty one is neutral.

    Paper: Hutto and Gilbert 2014, VADER: A Parsimonious Rule-based Model for Sentiment Analysis
    of Social Media Text (ICWSM).
    """
    analyzer = _analyzer()
    return [analyzer.polarity_scores(rollout.response)["compound"] for rollout in rollouts]


@functools.cache
def _analyzer() -> Any:
    from vaderSentiment.vaderSentiment import (  # pyright: ignore[reportMissingImports]
        SentimentIntensityAnalyzer,  # the extra `examples`
    )

    return SentimentIntensityAnalyzer()
