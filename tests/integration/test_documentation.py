"""What README and docs tell a user to run is run, as it stands there, in a copy of the examples.

The models are small and untrained, and the examples' files ask for two small steps; the text of the
commands is that of the pages. What a run needs most of its time for is run by the slow tier.
"""

import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.documentation import (
    PYTHON_SLOW,
    Block,
    Command,
    blocks,
    commands,
    expected_output,
    printed,
    small_copy,
)
from tests.integration.task import REPOSITORY

TIMEOUT_S = 600
FIRST_RUN = next(each for each in blocks("bash") if "raypo train first.yaml" in each.text)
"""The README's own first run; the fixture runs it, because all other pages look at what it left."""


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder after `make demo`: examples, models, prompts and runs of two examples.

    The runs are copies of the one that the README starts, which saves a run.
    """
    folder = small_copy(tmp_path_factory.mktemp("documentation"))
    run_block(FIRST_RUN, "integration", folder, port=0)
    for name in ("quickstart", "verifiable-reward"):
        shutil.copytree(folder / "runs/first", folder / "runs" / name)
    return folder


def environment(copy: Path) -> dict[str, str]:
    """`raypo` and `python` are those of this process, whatever else is installed."""
    programs = copy / "bin"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("raypo", "-m raypo.cli"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "CI": "1"}


def run(command: Command, copy: Path, port: int) -> str:
    """Run a command and hand back what it printed."""
    done = subprocess.run(
        ["bash", "-c", command.text.replace("8000", str(port))],
        cwd=copy,
        env=environment(copy),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    told = f"{command.block.where}: {command.text}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    return done.stdout


@contextmanager
def running(servers: list[Command], copy: Path, port: int) -> Iterator[None]:
    """The servers of a block, from when they say that they are ready to Ctrl-C."""
    processes = []
    try:
        for server in servers:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {server.text.replace('8000', str(port))}"],
                cwd=copy,
                env=environment(copy),
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            assert process.stdout is not None
            assert f":{port}" in process.stdout.readline(), server.text
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0


def run_block(block: Block, tier: str, copy: Path, port: int) -> None:
    """The commands of a block that are of a tier, in order."""
    own = [each for each in commands() if each.block == block and each.tier == tier]
    assert own, f"{block.where} has changed since the tests were collected"
    output = ""
    with running([each for each in own if each.is_server], copy, port):
        for command in own:
            if not command.is_server:
                output = run(command, copy, port)
    expected = expected_output(block)
    if expected is not None:
        assert printed(output) == expected, block.where


def blocks_with(tier: str) -> list[Block]:
    return [b for b in blocks("bash") if any(c.block == b and c.tier == tier for c in commands())]


@pytest.mark.parametrize(
    "block",
    [each for each in blocks_with("integration") if each != FIRST_RUN],
    ids=lambda block: block.where,
)
def test_commands_run(block: Block, copy: Path, unused_port: int):
    run_block(block, "integration", copy, unused_port)


@pytest.mark.parametrize("page", sorted({b.page for b in blocks("python")} - {*PYTHON_SLOW}))
def test_python_runs(page: str, copy: Path, monkeypatch: pytest.MonkeyPatch):
    run_python(page, copy, monkeypatch)


def run_python(page: str, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page one after the other, as one program."""
    monkeypatch.chdir(copy)
    program = copy / f"{Path(page).stem}_blocks.py"
    program.write_text("\n".join(each.text for each in blocks("python") if each.page == page))
    runpy.run_path(str(program), run_name="__main__")


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
