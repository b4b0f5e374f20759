"""`raypo serve-reward` as processes of its own."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from raypo.rewards.scoring import score
from raypo.rewards.wire import TOKEN_VARIABLE
from tests.integration.task import REPOSITORY
from tests.unit.rewards.test_remote import EXPECTED, ROLLOUTS, client


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "reward.py"
    path.write_text("def number(rollouts):\n    return [float(r.response) for r in rollouts]\n")
    return path


def command(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "raypo.cli", "serve-reward", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **environment},
    )


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "set reward.url to http://127.0.0.1:" in line, process.communicate()[1]
    return line.split("set reward.url to ")[1].strip()


def test_a_server_that_dies_mid_way_is_survived_by_the_other(reward_file: Path):
    """Two `raypo serve-reward` processes; one is killed with requests of ours under way."""
    reward_file.write_text(
        "import time\n"
        "def number(rollouts):\n"
        "    time.sleep(0.1)\n"
        "    return [float(r.response) for r in rollouts]\n"
    )
    servers = [command(f"{reward_file}:number", "--port", "0") for _ in range(2)]
    try:
        urls = [address(server) for server in servers]
        threading.Timer(0.25, servers[0].kill).start()
        many = ROLLOUTS * 4
        reward = client(*urls, batch_size=2, max_attempts=5)
        assert score(reward, many) == EXPECTED * 4
        assert servers[0].wait(timeout=10) == -signal.SIGKILL
        servers[1].send_signal(signal.SIGINT)
        assert servers[1].wait(timeout=10) in (0, 130)
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_beyond_loopback_a_token_is_demanded(reward_file: Path):
    process = command(f"{reward_file}:number", "--host", "0.0.0.0")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"Set the environment variable {TOKEN_VARIABLE}" in error
