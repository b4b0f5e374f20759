"""Execution of a model's programs and commands in a gVisor container, through Ray's sandboxes.

Concurrency. Ray's calls block, so each runs in a thread. A lock lets one command at a time run in
the container of a sandbox. A timer thread removes the container of a command that takes too long.
"""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from raypo.tools.sandbox import Ran, SandboxError, text_for_model

if TYPE_CHECKING:
    from ray.experimental.sandbox import SandboxRuntime

REMEDY = (
    "A container needs gVisor (a runsc that mounts EROFS images) and mkfs.erofs 1.7 or later "
    "(package erofs-utils) on PATH of every node, and access to the registry of its image. Install "
    "them, or use raypo.tools.sandbox.PythonSandbox, which needs neither."
)
# The output is cut inside the container, so that it cannot fill the memory of this process. It is
# base64-encoded, because Ray 2.60 fails on bytes that are not UTF-8. A dot follows the output when
# the command has ended. If the dot is missing, the container has ended before the command. The
# exit code is that of the command.
_CUT = """exec 3>&1
code="$( { { "$@" 2>&1 3>&- 4>&-; echo $? >&4; } | head -c "$0" | base64 >&3; } 4>&1 )"
echo . >&3
exit "$code"
"""


class ContainerSandbox:
    """Sandbox with a container of its own, whose files persist from one call to the next.

    gVisor runs the container, so a program reaches gVisor's kernel and not that of the host. The
    container starts with the first call, and ends with `close()`, with the process, or with a
    command that exceeds its time limit. The next call then starts a new one.
    """

    def __init__(
        self,
        image: str,
        *,
        time_limit_s: float = 10.0,
        start_timeout_s: float = 300.0,
        max_output_chars: int = 10_000,
        cpus: float = 0.0,
        memory_mb: int = 0,
        network: str = "none",
    ) -> None:
        """Store the settings. The first call starts the container.

        Args:
            image: Image like `python:3.12-slim`, or the path of its tar archive. It must have sh,
                head and base64; `python` also needs python3.
            time_limit_s: Wall-clock limit of a command, in seconds.
            start_timeout_s: Time limit for pulling the image and starting the container, in
                seconds.
            max_output_chars: Maximum length of the output in characters. The rest is dropped.
            cpus: Number of cores. 0 means no limit.
            memory_mb: Memory in MB. 0 means no limit.
            network: `none`, or one of Ray's other modes, like `public`.
        """
        self._create = {
            "image": image,
            "cpu": cpus,
            "memory": memory_mb * 10**6,
            "timeout_seconds": start_timeout_s,
            "network": network,
            "readonly": False,  # writes go to a layer of this container
        }
        self._time_limit_s, self._max_output_chars = time_limit_s, max_output_chars
        self._lock = threading.Lock()
        self._id: str | None = None
        self._to_remove: list[str] = []  # besides that of `_id`: their first removal failed

    async def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints, and its error if it has one. Files
        that earlier programs and commands have written are there.

        Args:
            code: The program. Print what you want to see.
        """
        return text_for_model(await self.run(["python3", "-c", code]), self._time_limit_s)

    async def shell(self, command: str) -> str:
        """Runs a shell command and returns what it prints. Files that earlier programs and
        commands have written are there.

        Args:
            command: The command, for sh.
        """
        return text_for_model(await self.run(["sh", "-c", command]), self._time_limit_s)

    async def run(self, command: Sequence[str]) -> Ran:
        """Run a command until it ends or times out.

        Raises:
            SandboxError: the container cannot be started, or has ended.
        """
        return await asyncio.to_thread(self._run, list(command))

    async def close(self) -> None:
        """Remove the container and its files."""
        await asyncio.to_thread(self._close)

    def _run(self, command: list[str]) -> Ran:
        from ray.experimental.sandbox import SandboxError as RayError

        # UTF-8 takes up to 4 bytes per character; 4 more tell whether the output exceeds the limit.
        cut = ["sh", "-c", _CUT, str(4 * self._max_output_chars + 4), *command]
        with self._lock:
            try:
                container = self._id = self._id or _runtime().create(**self._create)
            except (RayError, OSError) as error:
                raise SandboxError(f"{error} {REMEDY}") from error
            # Remove the container at the time limit, because Ray 2.60's own timeout waits for the
            # command.
            is_late = threading.Event()
            timer = threading.Timer(self._time_limit_s, self._end_container, (is_late,))
            timer.daemon = True
            timer.start()
            try:
                try:
                    ended = _runtime().exec(container, cut)
                finally:
                    timer.cancel()
                    timer.join()  # it may have begun to remove the container
            except (RayError, OSError) as error:
                self._remove()
                raise SandboxError(f"the container has ended: {error}") from error
            packed, end, _ = ended.stdout.partition(".")
            if not end and not is_late.is_set():
                self._remove()
                raise SandboxError(
                    f"the container has ended, perhaps for lack of memory (exit code "
                    f"{ended.exit_code}): {ended.stderr.strip()}"
                )
        packed = "".join(packed.split())
        whole = packed[: len(packed) // 4 * 4]  # if the container ended, the text is incomplete
        text = base64.b64decode(whole).decode(errors="replace")
        kept = text[: self._max_output_chars]
        exit_code = None if is_late.is_set() else ended.exit_code
        return Ran(kept, exit_code, is_cut=len(text) > len(kept))

    def _end_container(self, is_late: threading.Event) -> None:
        """End a command by removing its container."""
        is_late.set()
        with suppress(Exception):  # `close` tries again, and raises the error
            self._remove()

    def _close(self) -> None:
        with self._lock:
            self._remove()

    def _remove(self) -> None:
        """Remove the container, and those whose removal failed before."""
        if self._id is not None:
            self._to_remove.append(self._id)
        self._id = None  # even if the removal fails, no later command may use the container
        while self._to_remove:
            _runtime().delete(self._to_remove[-1])
            self._to_remove.pop()


@cache
def _runtime() -> SandboxRuntime:
    """Return the sandbox runtime that all containers of this process share."""
    from ray.experimental.sandbox import SandboxRuntime

    return SandboxRuntime()
