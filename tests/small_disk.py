"""A small disk for tests of full ones."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, *, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size at a new folder; skip the test if this user may not."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    try:
        yield path
    finally:
        # Lazily, because a process of the test may still have a file open.
        subprocess.run(["umount", "-l", str(path)], check=True)
