"""Store of the last push, from which a restarted engine loads its weights."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class WeightSnapshot:
    """Identity of the last push. Engines compare it with the push that they hold."""

    id: str
    """Id that is unique for each push, even of the same version."""
    adapter: str | None = None
    """Name of the adapter that was pushed. None means the engine's own weights."""
    store: str | None = None
    """Name of the `WeightStoreActor`. None means that the push is not stored: a restarted engine
    waits for the next push."""

    def fetch(self) -> Any:
        """Return the `WeightPush` or `AdapterPush`, or None if it is no longer kept."""
        if self.store is None:
            return None
        store = ray.get_actor(self.store)
        refs = ray.get(store.get.remote(self.id))
        return ray.get(refs[0]) if refs else None


class WeightStoreActor:
    """References to the last push of the weights and of each adapter. A zero-CPU actor.

    The pusher owns the bytes. If the store is lost, it restarts empty; engines that need weights
    then get none, and the learner pushes them again.
    """

    def __init__(self) -> None:
        self._pushes: dict[str | None, tuple[str, Any]] = {}

    def keep(self, adapter: str | None, id: str, ref: list[Any]) -> None:
        """Store a push, and drop the previous push of the same adapter or of the weights."""
        self._pushes[adapter] = (id, ref)

    def forget(self, adapter: str | None) -> None:
        """Drop a push, to free its memory before the next one."""
        self._pushes.pop(adapter, None)

    def get(self, id: str) -> list[Any] | None:
        """Return a list with the object reference of a push, or None if it is no longer kept."""
        # Within a list Ray passes a reference on without resolving it.
        return next((ref for push_id, ref in self._pushes.values() if push_id == id), None)

    def __repr__(self) -> str:
        return f"WeightStoreActor({len(self._pushes)} kept)"


@dataclass
class WeightStore:
    """Pusher's client of a `WeightStoreActor`, which it starts with the first push."""

    _name: str = field(default_factory=lambda: f"raypo:pushes:{uuid.uuid4().hex[:8]}")
    _store: Any = None

    def keep(self, push: Any, *, id: str, adapter: str | None = None) -> WeightSnapshot:
        """Keep a `WeightPush`, or an `AdapterPush` under its adapter's name."""
        if self._store is None:
            options = {"name": self._name, "num_cpus": 0, "max_restarts": -1}
            actor: Any = ray.remote(WeightStoreActor)
            self._store = actor.options(**options, max_task_retries=-1).remote()
        ray.get(self._store.keep.remote(adapter, id, [ray.put(push)]))
        return WeightSnapshot(id, adapter, self._name)

    def forget(self) -> None:
        """Drop the weights; adapters stay."""
        if self._store is not None:
            ray.get(self._store.forget.remote(None))
