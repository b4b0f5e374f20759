"""Environments for processes, which import nothing that takes its time."""

import asyncio
import os
import threading
import time
from typing import Any


class Counting:
    """Three turns of one point each."""

    def __init__(self) -> None:
        self.turn = 0

    def reset(self, prompt: Any, label: Any) -> None:
        self.label = label

    def step(self, action: str) -> Any:
        self.turn += 1
        return f" {self.turn}? ", 1.0, self.turn == 3


class Odd(Exception):
    """Cannot be unpickled: pickle calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Wrong(Counting):
    """Does what the label says in its second step."""

    def step(self, action: str) -> Any:
        self.turn += 1
        if self.turn == 2:
            match self.label:
                case "hang":
                    time.sleep(60)
                case "die":
                    os._exit(7)
                case "end":
                    raise SystemExit(3)
                case "lock":
                    self.lock = threading.Lock()
                case "answer":
                    return threading.Lock(), 1.0, False
                case "late":
                    raise TimeoutError("no server")
                case "odd":
                    raise Odd(1, 2)
        self.turn -= 1
        return super().step(action)


class Keeps(Counting):
    """Uses in all steps, of all episodes, what its module keeps, as a client is kept."""

    async def step(self, action: str) -> Any:
        await asyncio.gather(*(self.use() for _ in range(3)))
        return super().step(action)

    async def use(self) -> None:
        async with one_at_a_time:
            await asyncio.sleep(0)


one_at_a_time = asyncio.Semaphore(1)


class Closes(Counting):
    """Writes what it has lived through where its label says."""

    async def close(self) -> None:
        with open(self.label, "a") as file:
            file.write(f"{self.turn} ")


class ClosesUnmade(Closes):
    """Fails before it begins, and has something to close."""

    def reset(self, prompt: Any, label: Any) -> None:
        super().reset(prompt, label)
        raise OSError("it does not answer")


class ClosesHalfway(Closes):
    """Fails in its second step."""

    def step(self, action: str) -> Any:
        told = super().step(action)
        if self.turn == 2:
            raise OSError("it does not answer")
        return told
