"""What unit tests share: none of them starts Ray."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """Ray starts by itself where it is asked about an actor; the next test would find it."""
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
