"""A Ray that somebody has started with `ray start`: it asks for a token, and `auto` finds it."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.integration.ray_cluster import Host, StartedCluster, started_cluster
from tests.integration.task import REPOSITORY

DRIVER = """
import sys
import ray
from raypo.cluster.connect import connect
from raypo.config import ClusterSection, ConfigError
try:
    connect(ClusterSection(address=sys.argv[1] or None))
except ConfigError as error:
    sys.exit(str(error))
where = ray.get_runtime_context().gcs_address
print("connected to", where, "which added to", ray.get(ray.remote(lambda: 1 + 1).remote()))
ray.shutdown()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedCluster]:
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    with started_cluster([Host()], home=home) as started:
        yield started


def here(cluster: StartedCluster) -> str:
    """Its address as a pattern: Ray may tell another one of this machine's."""
    return rf"[\d.]+:{cluster.address.rsplit(':', 1)[1]}"


def drive(address: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, address],
        env=dict(env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_started_ray_is_reached_by_its_address(cluster: StartedCluster):
    done = drive(cluster.address, cluster.env)
    assert done.returncode == 0, done.stderr
    assert re.search(f"connected to {here(cluster)} which added to 2", done.stdout)
    assert "InvalidAuthToken" not in done.stderr


def test_a_started_ray_is_found_by_auto_which_says_so(cluster: StartedCluster):
    done = drive("auto", cluster.env)
    assert done.returncode == 0, done.stderr
    assert re.match(
        rf"raypo: Ray at {here(cluster)}, which runs on this machine; without cluster.address, "
        "raypo starts a new one\n",
        done.stdout,
    )
    assert "which added to 2" in done.stdout


def test_a_ray_of_ones_own_names_the_key_that_takes_the_started_one(cluster: StartedCluster):
    done = drive("", cluster.env)
    assert done.returncode == 0, done.stderr
    assert re.match(
        "raypo: starting a new Ray beside the one that runs on this machine "
        rf"\({here(cluster)}\); cluster.address=auto uses the running one\n",
        done.stdout,
    )
    assert not re.search(f"connected to {here(cluster)}", done.stdout)


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "this Ray requires a token, but none is set. Set RAY_AUTH_TOKEN to"),
        ("f" * 64, "this Ray requires a different token from the one that was found"),
    ],
)
def test_a_token_that_is_missing_or_wrong_is_told_in_words(
    cluster: StartedCluster, tmp_path: Path, token: str | None, said: str
):
    env = cluster.env | {"HOME": str(tmp_path)} | ({"RAY_AUTH_TOKEN": token} if token else {})
    done = drive(cluster.address, env)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cluster.address ({cluster.address}): {said}")
    assert len(done.stderr.splitlines()) == 1


def test_another_port_of_the_cluster_is_told_at_once(cluster: StartedCluster):
    dashboard = cluster.dashboard.removeprefix("http://")
    done = drive(dashboard, cluster.env)
    assert done.returncode == 1
    assert "the service there is not the head node of a Ray" in done.stderr


def test_the_script_that_submits_a_run_brings_the_token(cluster: StartedCluster):
    """As far as the run's own first words."""
    done = subprocess.run(
        [str(REPOSITORY / "examples/cluster/submit.sh"), "/nowhere.yaml"],
        env={**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "/nowhere.yaml: there is no such file" in done.stdout, done.stdout + done.stderr
