"""A run's messenger: workers tell what happens, the driver shows it and may ask for a stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from raypo.cluster.actors import start_named


class Monitor:
    """Events on their way to the driver, and the driver's wish to stop. A zero-CPU actor."""

    def __init__(self, about: Mapping[str, Any] | None = None) -> None:
        self._about = dict(about or {})
        self._metrics: dict[str, float] = {}
        self._changed_at = time.time()
        self._made = time.monotonic()
        self._events: list[tuple[str, Any]] = []
        self._stop = False
        self._attempts = 0
        self._group: PlacementGroup | None = None
        self._driver: list[dict[str, float]] = []

    def tell(self, kind: str, content: Any) -> None:
        """Keep an event for the driver."""
        self._events.append((kind, content))
        if kind in ("start", "step"):  # `start` says the first step, of a run that goes on a later
            self._metrics = content if kind == "step" else {"step": content - 1}
            self._changed_at = time.time()

    def standing(self) -> dict[str, Any]:
        """How the run stands: what `about` says, `metrics` of its last step, and `changed_at`.

        The last is when that step ended, or when the run began; seconds since 1970.
        """
        return {**self._about, "metrics": self._metrics, "changed_at": self._changed_at}

    def drain(self, memory: dict[str, float]) -> list[tuple[str, Any]]:
        """The events since the last call, in order.

        Args:
            memory: Of the driver, as `raypo.metrics.process_memory` says.
        """
        events, self._events, self._driver = self._events, [], [memory]
        return events

    def driver_memory(self) -> list[dict[str, float]]:
        """What the driver last said of its memory; empty before."""
        return self._driver

    def request_stop(self) -> None:
        """Ask the workers to stop at the end of the step."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Whether the driver wants the run to stop."""
        return self._stop

    def begin_attempt(self, group: PlacementGroup | None) -> float:
        """Note that learner workers have begun, in this placement group.

        Returns:
            Seconds since the run began that no worker has counted: of a later attempt none, for
            the checkpoint that it resumes from holds what the first one has counted.
        """
        waited_s = 0.0 if self._attempts else time.monotonic() - self._made
        self._attempts, self._group = self._attempts + 1, group
        return waited_s

    def end_attempt(self) -> tuple[int, PlacementGroup | None]:
        """How many attempts there were, and the group of the last; None: it was not begun."""
        group, self._group = self._group, None
        return self._attempts, group

    def __repr__(self) -> str:
        return "Monitor(stopping)" if self._stop else "Monitor(running)"


_PREFIX, _SUFFIX = "raypo:", ":monitor"
ANSWER_TIMEOUT_S = 5.0
"""How long the monitors of other runs may take to say how these stand."""


def start_monitor(run: str, *, about: Mapping[str, Any] | None = None) -> ActorHandle:
    """The monitor of a run, owned by this process.

    Args:
        about: `recipe`, `location` and `num_steps` of the run, for who asks the cluster.
    """
    name, kwargs = f"{_PREFIX}{run}{_SUFFIX}", {"about": dict(about or {})}
    return start_named(Monitor, name, options={"num_cpus": 0}, kwargs=kwargs)


def runs_under_way() -> list[tuple[str, dict[str, Any]]]:
    """The runs of the cluster that this process is connected to, and what their monitors say.

    Those of all namespaces; one that does not answer says nothing.
    """
    asked: dict[Any, str] = {}
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)  # typed as texts
    for actor in named:
        name = str(actor["name"])
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX):
            with suppress(ValueError):  # ended meanwhile
                answer = ray.get_actor(name, actor["namespace"]).standing.remote()
                asked[answer] = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    if asked:
        ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_TIMEOUT_S)
    answers: list[tuple[str, dict[str, Any]]] = []
    for answer, run in asked.items():
        with suppress(RayError):
            answers.append((run, ray.get(answer, timeout=0)))
    return answers


class MonitorClient:
    """A worker's end of the monitor; silent where there is none or on other ranks than 0."""

    def __init__(self, monitor: ActorHandle | None) -> None:
        self._monitor = monitor

    def begin_attempt(self, group: PlacementGroup | None) -> float:
        """Tell that the learner workers have begun; seconds that the run took before that."""
        if self._monitor is None:
            return 0.0
        (waited_s,) = ray.get([self._monitor.begin_attempt.remote(group)])
        return waited_s

    def phase(self, text: str) -> None:
        """What is going on now."""
        self._tell("phase", text)

    def step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step that has ended."""
        self._tell("step", dict(metrics))

    def start(self, first_step: int) -> None:
        """The first step, counted from 1, is about to begin."""
        self._tell("start", first_step)

    def message(self, text: str) -> None:
        """A line for people."""
        self._tell("message", text)

    def stop_requested(self) -> bool:
        """Whether the driver wants the run to stop."""
        return self._monitor is not None and bool(ray.get(self._monitor.stop_requested.remote()))

    def driver_memory(self) -> list[dict[str, float]]:
        """What the driver last said of its memory; empty where there is none."""
        return [] if self._monitor is None else ray.get(self._monitor.driver_memory.remote())

    def _tell(self, kind: str, content: Any) -> None:
        if self._monitor is not None:
            self._monitor.tell.remote(kind, content)
