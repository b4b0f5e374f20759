"""Speculative decoding, in a process of its own for each kind (`speculation_probe.py`)."""

import pytest

from tests.integration.task import run_probe


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_samples_are_the_policys_own(kind: str):
    assert "5 passed" in run_probe("speculation_probe.py", "-k", kind)
