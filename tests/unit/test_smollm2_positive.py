"""The example's reward: positive words count, an empty response is neutral."""

from types import SimpleNamespace

import pytest


def test_the_reward_is_the_sentiment_of_the_response():
    pytest.importorskip("vaderSentiment", reason="pip install 'raypo[examples]'")
    from examples.smollm2_positive.reward import positive

    texts = ("What a wonderful, delightful film!", "", "A terrible, boring waste of time.")
    good, empty, bad = positive([SimpleNamespace(response=text) for text in texts])  # type: ignore[arg-type]
    assert good > 0.5
    assert empty == 0.0
    assert bad < -0.5
