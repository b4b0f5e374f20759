"""Metrics of the engines' load in a step, and of the peak memory of all processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from raypo.cluster.actors import DeploymentError, survivors
from raypo.config import OnlineConfig
from raypo.metrics.process_memory import peak_memory
from raypo.metrics.reduce import slowest
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.serving.engine import Engine
from raypo.serving.requests import Load, Stretch
from raypo.tracking.trace import note_call


@dataclass
class EnginesLoad:
    """Metrics of the engines' load between two calls of `metrics`."""

    _looked_at: float | None = None
    _busy_s: float = 0.0
    _preemptions: int = 0
    _drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Drafted and accepted tokens of each engine at the last call."""
    _stepped: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Busy seconds and steps of each engine at the last call."""

    def metrics(self, stretches: Mapping[str, tuple[Load, Stretch]]) -> dict[str, float]:
        """Return `perf/engine_*` since the last call: requests, KV cache use and idle seconds.

        Args:
            stretches: Load and statistics of each engine that answers, by name.
        """
        now = time.monotonic()
        loads = [load for load, _ in stretches.values()]
        statistics = [stretch for _, stretch in stretches.values()]
        busy_s = sum(load.busy_s for load in loads)
        preemptions = sum(load.preemptions for load in loads)
        metrics = {
            "perf/engine_queued": sum((stretch.queued_mean for stretch in statistics), 0.0),
            "perf/engine_queued_max": max(
                (stretch.queued_max for stretch in statistics), default=0.0
            ),
            "perf/engine_running": sum((stretch.running_mean for stretch in statistics), 0.0),
            "perf/engine_running_max": max(
                (stretch.running_max for stretch in statistics), default=0.0
            ),
            "perf/engine_kv_cache": max(
                (stretch.kv_cache_mean for stretch in statistics), default=0.0
            ),
            "perf/engine_kv_cache_max": max(
                (stretch.kv_cache_max for stretch in statistics), default=0.0
            ),
            "perf/engine_preemptions": float(max(0, preemptions - self._preemptions)),
        }
        metrics |= self._slowest({name: load for name, (load, _) in stretches.items()})
        drafted = accepted = 0
        for name, (load, _) in stretches.items():
            before = self._drafts.get(name, (0, 0))
            if load.drafted < before[0]:  # the engine was restarted
                before = (0, 0)
            drafted += load.drafted - before[0]
            accepted += load.accepted - before[1]
            self._drafts[name] = load.drafted, load.accepted
        if drafted:
            metrics["perf/draft_acceptance"] = accepted / drafted
        # A restarted engine counts from 0, so a difference can be negative; it is reported as 0.
        if self._looked_at is not None and loads:
            worked_s = max(0.0, busy_s - self._busy_s) / len(loads)
            metrics["perf/engine_idle_s"] = max(0.0, now - self._looked_at - worked_s)
        self._looked_at, self._busy_s, self._preemptions = now, busy_s, preemptions
        return metrics

    def _slowest(self, loads: Mapping[str, Load]) -> dict[str, float]:
        """Return the slowest engine's index, and its seconds per step by the others' median."""
        costs = []
        for name, load in loads.items():
            busy_s, steps = self._stepped.get(name, (0.0, 0))
            if load.steps > steps:
                costs.append((load.busy_s - busy_s) / (load.steps - steps))
        is_whole = self._stepped.keys() == loads.keys() and len(costs) == len(loads) > 1
        self._stepped = {name: (load.busy_s, load.steps) for name, load in loads.items()}
        if not is_whole:  # an engine was idle, or (re)started
            return {}
        index, ratio = slowest(costs)
        return {"perf/slowest_engine": float(index), "perf/slowest_engine_ratio": ratio}


class ServiceGauges:
    """Reads the load and the memory of the run's services; rank 0 queries them for all workers."""

    def __init__(self, run: Run[OnlineConfig], services: Services) -> None:
        """Store the run and the services. Nothing is read yet."""
        self._run, self._services = run, services
        self._engines_load = EnginesLoad()
        self._memory: Mapping[str, Sequence[Future[dict[str, float]]]] = {}

    def load(self) -> dict[str, float]:
        """Return `perf/engine_*` since the last call, and add the engines' idle times to the trace.

        The result is empty if several runs share the engines.
        """
        # Other runs contribute to the load of a shared pool.
        if self._run.workers.rank > 0 or self._services.in_pool:
            return {}
        engines, stretches = self._services.engine.handle, {}
        answers = engines.control(Engine.stretch)
        for engine, answer in zip(engines.replicas, answers, strict=True):
            for load, stretch in survivors([answer]):
                stretches[engine.name] = load, stretch
                for begin, end in stretch.idle:
                    note_call(engine.name, "idle", begin, end)
        return self._engines_load.metrics(stretches)

    def memory(self) -> dict[str, float]:
        """Return the highest peak memory of each role's processes, such as `perf/memory_<role>_gb`.

        All workers call this after a push. The peak of a step's evaluation is reported with the
        next step.
        """
        run = self._run
        by_role = {"learner": run.workers.gather(peak_memory())}
        if run.workers.rank == 0:
            answers = self._services.ask_peak_memory()
            if run.config.rollout.has_requests_in_flight:
                # The replicas are sampling: read the answers that the last push requested.
                answers, self._memory = self._memory, answers
            # A broken replica is reported by the code that needs it, not by this metric.
            by_role |= {k: survivors(v, passing_over=DeploymentError) for k, v in answers.items()}
            by_role["driver"] = run.tell.driver_memory()
        return {
            f"perf/{kind}_{role}_gb": max(peak[kind] for peak in peaks if kind in peak)
            for role, peaks in by_role.items()
            for kind in sorted({kind for peak in peaks for kind in peak})
        }
