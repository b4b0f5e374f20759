"""How what is deployed is asked: `engine.generate.remote(requests).result()`.

Callers name these types, and none of a deployment. So a deployment's handle, an engine of this
process and a test's stand-in are the same to them, and a type checker tells which of the three
they have outgrown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Answer(Protocol[T_co]):
    """An answer that may still be on its way."""

    def result(self) -> T_co:
        """Wait for it; what was raised there is raised here."""
        ...


class AnswerOfEntries(Answer[list[T]], Protocol[T]):
    """An answer that is a list, of which some entries may be there before the others."""

    def news(self) -> Mapping[int, T]:
        """Entries that have come since this was last asked, by place; some may come twice."""
        ...


class AnswerOfOne(Answer[T_co], Protocol[T_co]):
    """The answer of one certain replica."""

    def failure(self) -> Exception | None:
        """What `result` raises; None where it does not, or the answer is not here. Never waits."""
        ...


class Method(Protocol[P, T_co]):
    """A method that some replica is asked for."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Answer[T_co]:
        """Ask one of them."""
        ...


class MethodOfEntries(Protocol[P, T]):
    """A method that some replica is asked for, and that answers a list entry by entry."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> AnswerOfEntries[T]:
        """Ask one of them."""
        ...


class MethodOfAll(Protocol[P, T_co]):
    """A method that every replica is asked for."""

    def on_all(self, *args: P.args, **kwargs: P.kwargs) -> Sequence[AnswerOfOne[T_co]]:
        """Ask each of them."""
        ...


class MethodOfEach(Method[P, T_co], MethodOfAll[P, T_co], Protocol[P, T_co]):
    """A method that one replica or every one is asked for."""


@dataclass(frozen=True)
class Here(Generic[P, T]):
    """A function of this process, asked as the method of a deployment with one replica is."""

    function: Callable[P, T]

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Given[T]:
        """Call it now."""
        return Given(self.function(*args, **kwargs))

    def on_all(self, *args: P.args, **kwargs: P.kwargs) -> list[Given[T]]:
        """Call it now, once: there is no other replica."""
        return [self.remote(*args, **kwargs)]


@dataclass(frozen=True)
class Given(Generic[T]):
    """An answer that is here."""

    value: T

    def result(self) -> T:
        """The answer."""
        return self.value

    def failure(self) -> None:
        """What has failed never gets here."""

    def news(self) -> dict[int, Any]:
        """Nothing: all of it is here."""
        return {}
