"""Sandboxed execution of a model's Python code.

Each program runs under a supervisor process, the script `jail.py`. A program needs a slot in
`_slots`. Tasks in all event loops of this process poll for a free slot.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from raypo.tools import jail

MB = 10**6

REMEDY = (
    "Python in a sandbox needs Linux 5.14 or later and user namespaces without root. Allow them: "
    "in a container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined, on "
    "Ubuntu with sysctl kernel.apparmor_restrict_unprivileged_userns=0, elsewhere with sysctl "
    "user.max_user_namespaces=10000. Or run agents without it."
)


class SandboxError(RuntimeError):
    """This host does not support the sandbox, so no program was run."""


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program."""

    output: str
    """Interleaved stdout and stderr, truncated to the limit."""
    exit_code: int | None
    """Exit code of the program. The negative signal number if a signal killed the program.
    None means that the time limit ended the program."""
    is_cut: bool = False
    """True if the output was truncated."""


POLL_S = 0.02
_slots: dict[int, threading.BoundedSemaphore] = {}
"""Semaphore for each concurrency limit. All sandboxes of this process with this limit share it,
because each episode may create a sandbox. It is not an asyncio semaphore, because synchronous
methods run in separate event loops."""
_pollers: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = (
    WeakValueDictionary()
)
"""Semaphore for each event loop and concurrency limit. It bounds the tasks that poll `_slots`. An
entry exists while one of its programs runs or waits."""


class PythonSandbox:
    """Sandbox that runs each Python program in fresh Linux namespaces, without root.

    A program can read Python and the system's libraries, and write to an empty folder in memory. It
    has no access to other files, processes or the network, and runs as the user nobody. Its files
    and processes end with it. It shares the kernel: use a virtual machine for code that might
    attack the kernel. docs/tools.md lists what the sandbox prevents and what it does not.
    """

    def __init__(
        self,
        *,
        time_limit_s: float = 10.0,
        memory_mb: int = 512,
        processes: int = 8,
        file_mb: int = 16,
        files: int = 256,
        max_output_chars: int = 10_000,
        readable: Sequence[str | Path] = (),
        at_once: int | None = None,
    ) -> None:
        """Store the limits. Nothing is started yet.

        Args:
            time_limit_s: Wall-clock limit of a program, in seconds, without the wait for a slot.
            memory_mb: Address space of each process in MB. Exceeding it raises MemoryError.
            processes: Maximum number of concurrent processes and threads.
            file_mb: Total size of the program's files in MB. The files are kept in memory.
            files: Maximum number of files, and of open file descriptors.
            max_output_chars: Maximum length of the output in characters. The rest is dropped.
            readable: Additional folders to read and import from. If the caller is root,
                the folders must be readable for all users.
            at_once: Maximum number of concurrent programs in this process. Further programs wait.
                All sandboxes with the same number share this limit. None means one program per
                core.
        """
        self._limits = {
            "time_limit_s": time_limit_s,
            "memory_bytes": memory_mb * MB,
            "processes": processes,
            "file_bytes": file_mb * MB,
            "files": files,
            "readable": [str(Path(path).resolve()) for path in readable],
        }
        self._time_limit_s = time_limit_s
        self._max_output_chars = max_output_chars
        self._at_once = at_once or os.cpu_count() or 1

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints, and its error if it has one. Each
        program starts anew: nothing is remembered from the one before.

        Args:
            code: The program. Print what you want to see.
        """
        result = await self.run(code)
        output = result.output + ("\n... (cut)" if result.is_cut else "")
        if result.exit_code is None:
            return f"{output}\nended after {self._time_limit_s:g} s: the time limit".lstrip()
        if result.exit_code < 0:
            return f"{output}\nended by a signal: {signal.strsignal(-result.exit_code)}".lstrip()
        return output or "(it printed nothing)"

    async def run(self, code: str) -> ProgramResult:
        """Run a program until it ends, times out, or the caller is cancelled.

        Raises:
            SandboxError: the host does not support the sandbox.
        """
        key = asyncio.get_running_loop(), self._at_once
        slots = _slots.setdefault(self._at_once, threading.BoundedSemaphore(self._at_once))
        async with _pollers.setdefault(key, asyncio.Semaphore(self._at_once)):
            while not slots.acquire(blocking=False):
                await asyncio.sleep(POLL_S)
            try:
                return await self._run(code)
            finally:
                slots.release()

    async def _run(self, code: str) -> ProgramResult:
        if sys.platform != "linux":
            raise SandboxError(f"there is no sandbox on {sys.platform}. {REMEDY}")
        read_end, report = os.pipe()
        with open(read_end) as report_file:
            try:
                process = await asyncio.create_subprocess_exec(
                    os.path.realpath(sys.executable),
                    *("-I", "-S", jail.__file__),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(report,),
                    env={},
                    start_new_session=True,  # the run itself ends it, so Ctrl-C must not kill it
                )
            finally:
                os.close(report)
            request = self._limits | {"program": code, "report": report}
            try:
                output, is_cut = await self._exchange(process, json.dumps(request))
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.terminate()
                    await process.wait()
            result = json.loads(report_file.readline() or '{"failed": "its supervisor was killed"}')
        if "failed" in result:
            raise SandboxError(f"{result['failed']}. {REMEDY}")
        exit_code = os.waitstatus_to_exitcode(result["status"])
        return ProgramResult(output, None if result["timed_out"] else exit_code, is_cut)

    async def _exchange(
        self, process: asyncio.subprocess.Process, request: str
    ) -> tuple[str, bool]:
        """Send the program, and return its output and whether the output was truncated."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # the supervisor failed to start; its report has the reason
            process.stdin.write(request.encode())
            await process.stdin.drain()
        process.stdin.close()
        # UTF-8 takes up to 4 bytes per character. 4 more show whether the output exceeds the limit.
        output, max_bytes = bytearray(), 4 * self._max_output_chars + 4
        while piece := await process.stdout.read(65536):
            output += piece[: max_bytes - len(output)]
        await process.wait()
        text = output.decode(errors="replace")
        return text[: self._max_output_chars], len(text) > self._max_output_chars
