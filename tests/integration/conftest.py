"""One local Ray for all runs of a test session."""

import os
from collections.abc import Iterator

import pytest

from raypo.config import ClusterSection
from tests.integration.task import REPOSITORY


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray

    from raypo.cluster.connect import connect

    # Workers import the tests' reward functions.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    )
    connect(ClusterSection())
    yield
    ray.shutdown()
