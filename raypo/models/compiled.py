"""Compiled code: torch.compile, and the folders in which it outlives a process."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "VLLM_CACHE_ROOT": "vllm",
}
"""Environment variables for the folders of compiled code, and their names below `cache_folder`."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function for dynamic shapes. Later processes and runs reuse the compiled code."""
    import torch

    keep_compiled_code()
    return torch.compile(function, dynamic=True, **options)


def cache_folder() -> Path:
    """Return the folder of all compiled code. It may be deleted, but should survive restarts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raypo"


def keep_compiled_code() -> None:
    """Put the compiled code of torch, Triton and vLLM into `cache_folder`.

    Variables that are set keep their values. The default of torch is below the temporary folder,
    which a reboot empties. Each process would then compile for 10 to 40 s in its first step.
    """
    for variable, name in FOLDERS.items():
        folder = cache_folder() / name
        with suppress(OSError):  # the defaults remain if home is read-only
            if variable not in os.environ:
                folder.mkdir(parents=True, exist_ok=True)
                os.environ[variable] = str(folder)


@contextmanager
def compiled_once(what: str) -> Iterator[None]:
    """Let the first process that enters compile alone; later ones find its code in vLLM's cache.

    All others wait until it has left, and then run at the same time. Once a process has left
    without an error, none waits any more. Otherwise the engines of a node would all compile the
    same code at the same time on the same cores, and vLLM writes its list of it without a lock.

    Args:
        what: Description of everything that determines the compiled code.
    """
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or cache_folder()) / "raypo"
    name = hashlib.sha256(what.encode()).hexdigest()[:32]
    is_done = folder / name
    with ExitStack() as lock:
        with suppress(OSError):  # in a folder that cannot be locked, nobody waits
            if not is_done.exists():
                folder.mkdir(parents=True, exist_ok=True)
                file = lock.enter_context((folder / f"{name}.lock").open("w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another process compiles, or others have waited for it
                    fcntl.flock(file, fcntl.LOCK_SH)
        yield
        with suppress(OSError):
            is_done.touch()
