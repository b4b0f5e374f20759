"""Classes to deploy, that tests can look into from outside."""

import os
import time
from pathlib import Path
from typing import Any

import ray


class Doubler:
    """Doubles, and writes each request that it has done to a file: `<number> <pid>`."""

    def __init__(self, folder: str, delays: tuple[float, ...] = (0.0,)) -> None:
        self._folder = Path(folder)
        number = len(list(self._folder.glob("started_*")))
        (self._folder / f"started_{os.getpid()}").touch()
        self._delay_s = delays[number % len(delays)]
        self._version: int | None = None
        self._notes: list[str] = []
        self._is_broken = False

    def __repr__(self) -> str:
        return f"Doubler(v{self._version}, ready)"

    def check_health(self) -> None:
        if self._is_broken:
            raise RuntimeError("the doubler is broken")

    def double(self, number: int) -> int:
        time.sleep(self._delay_s)
        with (self._folder / "done").open("a") as file:
            file.write(f"{number} {os.getpid()}\n")
        return 2 * number

    def pid(self) -> int:
        return os.getpid()

    def delay_s(self) -> float:
        return self._delay_s

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def load(self, version: int) -> int:
        self._version = version
        return version

    def version(self) -> int | None:
        return self._version

    def note(self, text: str) -> None:
        self._notes.append(text)

    def noted(self) -> list[str]:
        return self._notes

    def break_down(self) -> None:
        self._is_broken = True
        raise IndexError("out of range")

    def fail(self) -> None:
        raise ValueError("a bad request")

    def wait_for(self, path: str) -> str:
        while not Path(path).exists():
            time.sleep(0.02)
        return "seen"


class Stillborn:
    def __init__(self) -> None:
        raise ValueError("no such model")


@ray.remote(num_cpus=0)
class Client:
    """A caller in a process of its own."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def double(self, numbers: list[int]) -> list[int]:
        return [self._handle.double.remote(number).result() for number in numbers]


def pids(handle: Any) -> list[int]:
    return [response.result() for response in handle.pid.on_all()]


def done(folder: Path) -> list[tuple[int, int]]:
    """(number, pid) of every request that a replica has done."""
    file = folder / "done"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(int(number), int(pid)) for number, pid in map(str.split, lines)]
