"""Containers under gVisor: what is asked of Ray's sandboxes, and what becomes of their answers.

The runtime here runs commands on this host. A real one needs runsc and mkfs.erofs 1.7.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.experimental.sandbox import ExecResult, SandboxExecError

from raypo.tools import container
from raypo.tools.calls import answer_calls
from raypo.tools.container import ContainerSandbox
from raypo.tools.sandbox import Ran, SandboxError


@dataclass
class Host:
    """A runtime whose containers are processes of this host; a deleted one ends its process."""

    folder: Path
    created: list[dict[str, Any]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    fails: bool = False
    failing_removals: int = 0

    def create(self, **settings: Any) -> str:
        self.created.append(settings)
        return str(len(self.created))

    def exec(self, name: str, command: list[str]) -> ExecResult:
        if self.fails:
            raise SandboxExecError("gone")
        self.running[name] = process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        output, _ = process.communicate()
        return ExecResult(
            exit_code=process.returncode, stdout=output, stderr="", duration_seconds=0.0
        )

    def delete(self, name: str) -> None:
        if self.failing_removals:
            self.failing_removals -= 1
            raise OSError("busy")
        self.deleted.append(name)
        if name in self.running and self.running[name].poll() is None:
            os.killpg(self.running[name].pid, signal.SIGKILL)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    runtime = Host(tmp_path)
    monkeypatch.setattr(container, "_runtime", lambda: runtime)
    return runtime


def ran(sandbox: ContainerSandbox, command: str) -> Ran:
    return asyncio.run(sandbox.run(["sh", "-c", command]))


def test_calls_share_a_container_and_its_files_until_it_is_closed(host: Host):
    sandbox = ContainerSandbox("python:3.12", memory_mb=100)
    call = '<tool_call>{"name": "%s", "arguments": {"%s": "%s"}}</tool_call>'
    text = call % ("shell", "command", "echo 42 > file") + call % (
        "python",
        "code",
        "print(open('file').read())",
    )
    answers = asyncio.run(answer_calls(text, [sandbox.shell, sandbox.python]))
    assert answers == ["(it printed nothing)", "42\n\n"]
    (settings,) = host.created
    assert (settings["image"], settings["memory"]) == ("python:3.12", 100_000_000)
    assert (settings["network"], settings["readonly"]) == ("none", False)
    for _ in range(2):
        asyncio.run(sandbox.close())
    assert host.deleted == ["1"]
    assert ran(sandbox, "echo again").output == "again\n"
    assert len(host.created) == 2


def test_output_and_errors_come_in_order_with_the_exit_code(host: Host):
    sandbox = ContainerSandbox("image", max_output_chars=5)
    assert ran(sandbox, "echo a; echo b >&2; exit 3") == Ran("a\nb\n", 3)
    assert ran(sandbox, "printf 12345") == Ran("12345", 0)
    assert ran(sandbox, "printf äöüäöü") == Ran("äöüäö", 0, is_cut=True)
    assert ran(sandbox, r"printf '\377x'") == Ran("\N{REPLACEMENT CHARACTER}x", 0)
    endless = ran(sandbox, "yes")
    assert (endless.output, endless.is_cut) == ("y\ny\ny", True)


def test_a_command_that_takes_too_long_ends_its_container(host: Host):
    sandbox = ContainerSandbox("image", time_limit_s=0.2)
    assert ran(sandbox, "sleep 20") == Ran("", None)
    assert host.deleted == ["1"]
    assert asyncio.run(sandbox.shell("sleep 20")) == "ended after 0.2 s: the time limit"
    assert len(host.created) == 2


def test_a_container_that_could_not_be_removed_at_the_time_limit_is_removed_by_close(host: Host):
    sandbox = ContainerSandbox("image", time_limit_s=0.1)
    host.failing_removals = 1
    assert ran(sandbox, "sleep 0.3") == Ran("", None)
    sandbox._time_limit_s = 60
    assert ran(sandbox, "true") == Ran("", 0)
    assert (len(host.created), host.deleted) == (2, [])
    host.failing_removals = 1
    with pytest.raises(OSError, match="busy"):
        asyncio.run(sandbox.close())
    asyncio.run(sandbox.close())
    assert sorted(host.deleted) == ["1", "2"]


def test_what_a_command_printed_before_its_time_was_up_is_cut_anywhere(
    host: Host, monkeypatch: pytest.MonkeyPatch
):
    def late(name: str, command: list[str]) -> ExecResult:
        time.sleep(0.2)
        return ExecResult(exit_code=137, stdout="YWJj\nZG", stderr="", duration_seconds=0.2)

    monkeypatch.setattr(host, "exec", late)
    assert ran(ContainerSandbox("image", time_limit_s=0.1), "true") == Ran("abc", None)


def test_a_container_that_ends_with_a_command_is_an_error_and_not_an_empty_output(host: Host):
    sandbox = ContainerSandbox("image")
    with pytest.raises(SandboxError, match=r"has ended, perhaps for lack of memory \(exit code -9"):
        ran(sandbox, "kill -9 0")
    assert ran(sandbox, "echo again").output == "again\n"
    assert len(host.created) == 2


def test_commands_at_the_same_time_run_one_after_another(host: Host):
    sandbox = ContainerSandbox("image")
    command = "echo in >> log; sleep 0.05; echo out >> log"

    async def both() -> None:
        await asyncio.gather(*(sandbox.shell(command) for _ in range(3)))

    asyncio.run(both())
    assert (host.folder / "log").read_text().split() == ["in", "out"] * 3
    assert len(host.created) == 1


def test_a_container_that_has_ended_is_an_error_and_the_next_call_starts_another(host: Host):
    sandbox = ContainerSandbox("image")
    host.fails = True
    with pytest.raises(SandboxError, match="the container has ended: gone"):
        ran(sandbox, "true")
    host.fails = False
    assert ran(sandbox, "true") == Ran("", 0)
    assert len(host.created) == 2


def test_without_gvisor_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Ray's own runtime, on a node that has neither runsc nor mkfs.erofs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "image.tar").touch()
    with pytest.raises(SandboxError, match=r"needs gVisor \(a runsc.*PythonSandbox") as caught:
        ran(ContainerSandbox(str(tmp_path / "image.tar")), "true")
    assert "mkfs.erofs" in str(caught.value.__cause__)
