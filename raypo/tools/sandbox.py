"""Python code of a model, run where it can reach nothing."""

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
    """This host cannot keep a program in a sandbox; none was run."""


@dataclass(frozen=True)
class Ran:
    """What a program left."""

    output: str
    """What it wrote to stdout and stderr, in order; cut at the limit."""
    exit_code: int | None
    """Negative: the signal that ended it; None: the time limit did."""
    is_cut: bool = False
    """Whether there was more output."""


LOOK_EVERY_S = 0.02
_turns: dict[int, threading.BoundedSemaphore] = {}
"""Of this process, by what is allowed at once: all sandboxes share it, for each episode may make
one, and plain methods have event loops of their own."""
_lines: WeakValueDictionary[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = (
    WeakValueDictionary()
)
"""Of an event loop: who may look for a turn; there while a program runs or waits."""


class PythonSandbox:
    """Runs Python programs in Linux namespaces of their own, each a fresh one, without root.

    A program sees Python and the system's libraries, read-only, and an empty folder in memory; it
    sees no other file and no process, has no network and is not its caller's user. What it leaves
    behind ends with it. It shares the kernel: for code of somebody who would attack that, use a
    virtual machine. docs/tools.md says what is kept out and what is not.
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
        """Nothing starts here.

        Args:
            time_limit_s: Seconds of a program, on the clock; it begins when its turn comes.
            memory_mb: Address space of each of its processes; beyond it, MemoryError.
            processes: It may have at a time, threads among them.
            file_mb: All of its files together; they lie in memory too.
            files: It may make, and have open.
            max_output_chars: What is kept of its output.
            readable: Folders that it may read and import from, beside Python's own; where root
                asks, those that all users may read.
            at_once: Programs that run at a time in this process, of all sandboxes with this number;
                others wait. None: one for each core.
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
        ran = await self.run(code)
        output = ran.output + ("\n... (cut)" if ran.is_cut else "")
        if ran.exit_code is None:
            return f"{output}\nended after {self._time_limit_s:g} s: the time limit".lstrip()
        if ran.exit_code < 0:
            return f"{output}\nended by {signal.Signals(-ran.exit_code).name}".lstrip()
        return output or "(it printed nothing)"

    async def run(self, code: str) -> Ran:
        """Run a program to its end or its time limit; cancelled, it is ended.

        Raises:
            SandboxError: the host cannot keep it in.
        """
        key = asyncio.get_running_loop(), self._at_once
        turns = _turns.setdefault(self._at_once, threading.BoundedSemaphore(self._at_once))
        async with _lines.setdefault(key, asyncio.Semaphore(self._at_once)):
            while not turns.acquire(blocking=False):
                await asyncio.sleep(LOOK_EVERY_S)
            try:
                return await self._run(code)
            finally:
                turns.release()

    async def _run(self, code: str) -> Ran:
        if sys.platform != "linux":
            raise SandboxError(f"there is no sandbox on {sys.platform}. {REMEDY}")
        heard, report = os.pipe()
        with open(heard) as lines:
            try:
                process = await asyncio.create_subprocess_exec(
                    os.path.realpath(sys.executable),
                    *("-I", "-S", jail.__file__),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(report,),
                    env={},
                    start_new_session=True,  # Ctrl-C ends the run, and the run ends it
                )
            finally:
                os.close(report)
            asked = self._limits | {"program": code, "report": report}
            try:
                output, is_cut = await self._talk(process, json.dumps(asked))
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.terminate()
                    await process.wait()
            said = json.loads(lines.readline() or '{"failed": "its keeper was killed"}')
        if "failed" in said:
            raise SandboxError(f"{said['failed']}. {REMEDY}")
        ended = os.waitstatus_to_exitcode(said["status"])
        return Ran(output, None if said["timed_out"] else ended, is_cut)

    async def _talk(self, process: asyncio.subprocess.Process, asked: str) -> tuple[str, bool]:
        """Hand the program over, and what it writes until its end; whether that was too much."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError):  # it could not start; its report says why
            process.stdin.write(asked.encode())
            await process.stdin.drain()
        process.stdin.close()
        kept, room = bytearray(), 4 * self._max_output_chars + 4
        while piece := await process.stdout.read(65536):
            kept += piece[: room - len(kept)]
        await process.wait()
        text = kept.decode(errors="replace")
        return text[: self._max_output_chars], len(text) > self._max_output_chars
