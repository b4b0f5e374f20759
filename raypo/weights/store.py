"""Where an engine that was started again finds what the others were pushed meanwhile."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class Kept:
    """What engines were pushed last, by which they tell whether they hold it."""

    id: str
    """Another one for each push of whatever version."""
    adapter: str | None = None
    """Name of the adapter that was pushed; None: the weights of the engine itself."""
    store: str | None = None
    """Name of the `PushStore`; None: nothing is kept, engines without it wait for the next push."""

    def fetch(self) -> Any:
        """The `WeightPush` or `AdapterPush`; None where it is kept no longer."""
        if self.store is None:
            return None
        store = ray.get_actor(self.store)
        found = ray.get(store.get.remote(self.id))
        return ray.get(found[0]) if found else None


class PushStore:
    """References to the last push of the weights and of each adapter. A zero-CPU actor.

    The bytes are the pusher's. A store that is lost comes back empty; what asks for weights then
    hears so, and the learner pushes them again.
    """

    def __init__(self) -> None:
        self._pushes: dict[str | None, tuple[str, Any]] = {}

    def keep(self, adapter: str | None, id: str, ref: list[Any]) -> None:
        """Keep a push in the place of the one before."""
        self._pushes[adapter] = (id, ref)

    def forget(self, adapter: str | None) -> None:
        """Let go of a push, before the next one takes room."""
        self._pushes.pop(adapter, None)

    def get(self, id: str) -> list[Any] | None:
        """A reference in a list, so that Ray hands it on as it is."""
        return next((ref for kept, ref in self._pushes.values() if kept == id), None)

    def __repr__(self) -> str:
        return f"PushStore({len(self._pushes)} kept)"


@dataclass
class Keeper:
    """The pusher's end of a store, which it starts when it first has something to keep."""

    _name: str = field(default_factory=lambda: f"raypo:pushes:{uuid.uuid4().hex[:8]}")
    _store: Any = None

    def keep(self, push: Any, *, id: str, adapter: str | None = None) -> Kept:
        """Keep a `WeightPush`, or an `AdapterPush` under its adapter's name."""
        if self._store is None:
            options = {"name": self._name, "num_cpus": 0, "max_restarts": -1}
            actor: Any = ray.remote(PushStore)
            self._store = actor.options(**options, max_task_retries=-1).remote()
        ray.get(self._store.keep.remote(adapter, id, [ray.put(push)]))
        return Kept(id, adapter, self._name)

    def forget(self) -> None:
        """Let go of the weights."""
        if self._store is not None:
            ray.get(self._store.forget.remote(None))
