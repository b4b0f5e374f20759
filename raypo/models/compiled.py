"""torch.compile with a persistent code cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable for torch's folder of compiled code."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function for dynamic shapes. Later processes and runs reuse the compiled code."""
    keep_compiled_code()
    return torch.compile(function, dynamic=True, **options)


def keep_compiled_code() -> None:
    """Put torch's cache of compiled code into the user's cache folder.

    It does nothing if TORCHINDUCTOR_CACHE_DIR is set. torch's default is below the temporary
    folder, which a reboot empties. Each process would then compile for 10 to 40 s in its first
    step.
    """
    if CACHE in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "raypo" / "inductor"
    with suppress(OSError):  # torch's default remains if home is read-only
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE] = str(folder)
