"""Futures of remote calls, as their callers see them: `engine.generate(requests).result()`.

Three things satisfy these protocols: a call to a deployment (`raypo.deployment.pending_call`), a
value that this process computed itself (`Done`), and a stand-in of a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """Future of a remote call."""

    def result(self) -> T_co:
        """Wait for the value, or raise what the call raised."""
        ...


class PendingBatch(Pending[list[T]], Protocol[T]):
    """Future of a list whose entries may be ready one before the other."""

    def partial(self) -> Mapping[int, T]:
        """Return entries by index that became ready since the last call; an entry may repeat."""
        ...


class PendingPinned(Pending[T_co], Protocol[T_co]):
    """Future of a call to one particular replica."""

    def failure(self) -> Exception | None:
        """Return the error that `result` would raise; None if there is none yet. Never waits."""
        ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """A value that is ready, in the place of a future."""

    value: T

    def result(self) -> T:
        """Return the value."""
        return self.value

    def failure(self) -> None:
        """Return None: a call that fails in this process raises at once."""

    def partial(self) -> dict[int, Any]:
        """Return nothing, since all entries are ready."""
        return {}
