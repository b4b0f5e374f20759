"""torch.compile as GPUs get it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the folder of compiled code."""


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile for tensors of any sizes; later processes and runs find what is compiled."""
    keep_compiled_code()
    return torch.compile(function, dynamic=True, **options)


def keep_compiled_code() -> None:
    """Let torch keep compiled code in the user's cache, unless the user has named a folder.

    torch's own choice is below the temporary folder, which a container or a restart empties: each
    process would compile for 10 to 40 s in its first step again.
    """
    if CACHE in os.environ:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "raypo" / "inductor"
    with suppress(OSError):  # a home that cannot be written to: torch's own folder then
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE] = str(folder)
