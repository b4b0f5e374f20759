"""The largest micro-batch of the acceptance on a GPU, small and on this CPU."""

import pytest

from tests.gpu import parts


def test_the_largest_microbatch_passes_forward_and_backward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        parts, "SIZES", {"hidden_size": 56, "intermediate_size": 64, "vocab_size": 64}
    )
    figures = parts.microbatch("float32", layers=1, device="cpu")
    assert figures["planned_gb"] > 0.0
