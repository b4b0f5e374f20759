"""Callbacks of the soak: seeded kills, and a measurement of all processes of the run's Ray."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from raypo.run.callbacks import StepView
from tests.integration.task import pid_of
from tests.slow.killed_roles import SERVED, parent, pid_of_actor

SEED = 58
EVERY = 5
"""Steps between two measurements."""
NAME = "soak"
ROLES = (*SERVED, "worker_0", *SERVED, "worker_1", *SERVED, "controller")
"""Roles to kill, in rounds: those that are served more often than those that restart the run."""


def folder() -> Path:
    return Path(os.environ["SOAK_FOLDER"])


def kills() -> Iterator[tuple[int, str]]:
    """Yield the steps after which a role is killed, without end."""
    generator, step = random.Random(SEED), 0
    while True:
        for role in generator.sample(ROLES, len(ROLES)):
            step += generator.randint(6, 18)
            yield step, role


def disturb(view: StepView) -> None:
    """Kill a role if it is its turn. Each kill happens once, also if its step is repeated."""
    record = folder() / "kills.txt"
    done = len(record.read_text().splitlines()) if record.exists() else 0
    step, role = next(islice(kills(), done, None))
    if step > view.step:
        return
    with record.open("a") as file:
        file.write(f"{view.step} {role}\n")
    if role in SERVED:
        os.kill(pid_of(f"raypo:{NAME}:{role}:0"), signal.SIGKILL)
        return
    titles = {"worker_1": "ray::RayTrainWorker", "controller": "ray::TrainController"}
    os.kill(pid_of_actor(titles[role]) if role in titles else os.getpid(), signal.SIGKILL)
    time.sleep(600)  # this process ends with the others


def measure(view: StepView) -> None:
    """Append the memory, file handles and shared memory of each process to a file."""
    if view.step % EVERY:
        return
    raylet = parent()
    driver = raylet.parent()
    assert driver is not None
    shared: dict[int, int] = {}
    rows = []
    for process in [driver, *driver.children(recursive=True)]:
        with suppress(psutil.Error, OSError):
            title = " ".join(process.cmdline())[:60] or process.name()
            rows.append(
                {
                    "pid": process.pid,
                    "title": title,
                    "bytes": process.memory_full_info().uss,
                    "handles": process.num_fds(),
                    "threads": process.num_threads(),
                }
            )
            shared |= shared_files(process.pid)
    line = {"step": view.step, "processes": rows, "shared": sum(shared.values())}
    with (folder() / "measured.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def shared_files(pid: int) -> dict[int, int]:
    """Return the allocated bytes of files in /dev/shm that a process holds, by inode."""
    sizes: dict[int, int] = {}
    for handle in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(handle).startswith("/dev/shm"):
                status = handle.stat()
                sizes[status.st_ino] = 512 * status.st_blocks
    return sizes


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder() / name).read_text().splitlines()]
