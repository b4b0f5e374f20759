"""One local Ray for all runs of a test session."""

import os
import socket
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


@pytest.fixture(scope="session")
def group() -> Iterator[None]:
    """The one process group of this process: DeepSpeed keeps the first that it sees."""
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
