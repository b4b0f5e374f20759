"""What unit tests share: none of them starts Ray."""

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest

from raypo.tools.sandbox import PythonSandbox, SandboxError


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """Ray starts by itself where it is asked about an actor; the next test would find it."""
    yield
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()


@pytest.fixture(scope="session")
def python_sandbox() -> None:
    """The host can keep a program in; where it cannot, its tests are skipped, or must not be."""
    try:
        asyncio.run(PythonSandbox().run(""))
    except SandboxError as error:
        if os.environ.get("RAYPO_SANDBOX") == "required":
            raise
        pytest.skip(str(error))
