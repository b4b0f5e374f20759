"""Store of the last weight push, from which a restarted engine loads its weights."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class WeightSnapshot:
    """Reference to a push. Engines compare it with the push that they have loaded."""

    id: str
    """Unique id of the push. Two pushes of the same version have different ids."""
    adapter: str | None = None
    """Name of the pushed adapter. None means that the whole weights were pushed."""
    store: str | None = None
    """Name of the `WeightStoreActor`. None means that the push is not stored, so a restarted engine
    has to wait for the next push."""

    def fetch(self) -> Any:
        """Return the `WeightPush` or `AdapterPush`, or None if it is no longer stored."""
        if self.store is None:
            return None
        store = ray.get_actor(self.store)
        refs = ray.get(store.get.remote(self.id))
        return ray.get(refs[0]) if refs else None


class WeightStoreActor:
    """Zero-CPU actor that stores references to the last push of the weights and of each adapter.

    The pusher owns the data. If the actor is lost, it restarts empty. Restarted engines then find
    no weights, until the learner pushes them again.
    """

    def __init__(self) -> None:
        self._pushes: dict[str | None, tuple[str, Any]] = {}

    def keep(self, adapter: str | None, id: str, ref: list[Any]) -> None:
        """Store a push, and drop the previous push of the same adapter or of the weights."""
        self._pushes[adapter] = (id, ref)

    def forget(self, adapter: str | None) -> None:
        """Drop a push, to free its memory before the next push."""
        self._pushes.pop(adapter, None)

    def get(self, id: str) -> list[Any] | None:
        """Return a list with a push's object reference, or None if it is no longer stored."""
        # Ray does not resolve references inside a list, so the data is not copied here.
        return next((ref for push_id, ref in self._pushes.values() if push_id == id), None)

    def __repr__(self) -> str:
        return f"WeightStoreActor({len(self._pushes)} kept)"


@dataclass
class WeightStore:
    """The pusher's client of a `WeightStoreActor`, which is started at the first push."""

    _name: str = field(default_factory=lambda: f"raypo:pushes:{uuid.uuid4().hex[:8]}")
    _store: Any = None

    def keep(self, push: Any, *, id: str, adapter: str | None = None) -> WeightSnapshot:
        """Store a push and return its snapshot.

        Args:
            push: A `WeightPush` or an `AdapterPush`.
            id: Unique id of the push.
            adapter: Name of the adapter, or None for the whole weights.
        """
        if self._store is None:
            options = {"name": self._name, "num_cpus": 0, "max_restarts": -1}
            actor: Any = ray.remote(WeightStoreActor)
            self._store = actor.options(**options, max_task_retries=-1).remote()
        ray.get(self._store.keep.remote(adapter, id, [ray.put(push)]))
        return WeightSnapshot(id, adapter, self._name)

    def forget(self) -> None:
        """Drop the stored weights. Stored adapters remain."""
        if self._store is not None:
            ray.get(self._store.forget.remote(None))
