"""What shares GPUs with a learner starts role after role; real Ray, nothing on a GPU."""

from pathlib import Path

import pytest

from raypo.collectives import Workers
from raypo.deployment.deployment import Deployment, Placement
from raypo.run.services import _start
from tests.integration.deployments import Sleeper

pytestmark = pytest.mark.usefixtures("local_ray")


def test_each_role_makes_room_before_the_next_one_starts(tmp_path: Path):
    """vLLM asks what is free when it starts, and a GPU does not hold all of them awake."""
    path = tmp_path / "log"
    deployments = [
        Deployment(
            f"raypo:turns:{role}",
            Sleeper,
            {"path": str(path), "name": role},
            start_timeout_s=60.0,
        )
        for role in ("engine", "reference")
    ]
    places = {"engine": [Placement(), Placement()], "reference": [Placement()]}
    handles = _start(deployments, places, Workers(), starts_sequentially=True, sleeps=True)
    try:
        assert path.read_text().splitlines() == [
            *["engine made"] * 2,
            *["engine asleep"] * 2,
            "reference made",
            "reference asleep",
        ]
    finally:
        for handle in handles.values():
            handle.shutdown(0.0)
