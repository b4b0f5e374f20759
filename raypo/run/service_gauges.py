"""Metrics of the engines' load during a step, and of the peak memory of all processes."""

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
from raypo.serving.requests import Load, LoadSummary
from raypo.tracking.trace import trace_call


@dataclass
class EnginesLoad:
    """Computes metrics of the engines' load between two calls of `metrics`."""

    _last_time: float | None = None
    _busy_s: float = 0.0
    _preemptions: int = 0
    _drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of drafted and accepted tokens of each engine at the last call."""
    _stepped: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Busy seconds and steps of each engine at the last call."""

    def metrics(self, by_engine: Mapping[str, tuple[Load, LoadSummary]]) -> dict[str, float]:
        """Return `perf/engine_*` since the last call: requests, KV cache usage and idle seconds.

        Args:
            by_engine: Load and statistics of each responding engine, by name.
        """
        now = time.monotonic()
        loads = [load for load, _ in by_engine.values()]
        statistics = [summary for _, summary in by_engine.values()]
        busy_s = sum(load.busy_s for load in loads)
        preemptions = sum(load.preemptions for load in loads)
        metrics = {
            "perf/engine_queued": sum((summary.queued_mean for summary in statistics), 0.0),
            "perf/engine_queued_max": max(
                (summary.queued_max for summary in statistics), default=0.0
            ),
            "perf/engine_running": sum((summary.running_mean for summary in statistics), 0.0),
            "perf/engine_running_max": max(
                (summary.running_max for summary in statistics), default=0.0
            ),
            "perf/engine_kv_cache": max(
                (summary.kv_cache_mean for summary in statistics), default=0.0
            ),
            "perf/engine_kv_cache_max": max(
                (summary.kv_cache_max for summary in statistics), default=0.0
            ),
            "perf/engine_preemptions": float(max(0, preemptions - self._preemptions)),
        }
        metrics |= self._slowest({name: load for name, (load, _) in by_engine.items()})
        drafted = accepted = 0
        for name, (load, _) in by_engine.items():
            previous = self._drafts.get(name, (0, 0))
            if load.drafted < previous[0]:  # the engine was restarted
                previous = (0, 0)
            drafted += load.drafted - previous[0]
            accepted += load.accepted - previous[1]
            self._drafts[name] = load.drafted, load.accepted
        if drafted:
            metrics["perf/draft_acceptance"] = accepted / drafted
        # A restarted engine counts from 0, so a difference can be negative. It is reported as 0.
        if self._last_time is not None and loads:
            busy_s_per_engine = max(0.0, busy_s - self._busy_s) / len(loads)
            metrics["perf/engine_idle_s"] = max(0.0, now - self._last_time - busy_s_per_engine)
        self._last_time, self._busy_s, self._preemptions = now, busy_s, preemptions
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
    """Reads load and memory of the run's services. Rank 0 queries them for all workers."""

    def __init__(self, run: Run[OnlineConfig], services: Services) -> None:
        """Store the run and the services. Nothing is read yet."""
        self._run, self._services = run, services
        self._engines_load = EnginesLoad()
        self._memory: Mapping[str, Sequence[Future[dict[str, float]]]] = {}

    def load(self) -> dict[str, float]:
        """Return `perf/engine_*` since the last call, and add the engines' idle times to the trace.

        The result is empty on ranks above 0, and if several runs share the engines.
        """
        # The load of shared engines would include other runs.
        if self._run.workers.rank > 0 or self._services.uses_shared_engines:
            return {}
        engines, loads = self._services.engine.handle, {}
        replies = engines.control(Engine.load_summary)
        for engine, reply in zip(engines.replicas, replies, strict=True):
            for load, summary in survivors([reply]):
                loads[engine.name] = load, summary
                for begin, end in summary.idle:
                    trace_call(engine.name, "idle", begin, end)
        return self._engines_load.metrics(loads)

    def memory(self) -> dict[str, float]:
        """Return the maximum peak memory over each role's processes (`perf/memory_<role>_gb`, ...).

        All workers call this after a push. The peak of a step's evaluation is reported with the
        next step.
        """
        run = self._run
        memory_by_role = {"learner": run.workers.gather(peak_memory())}
        if run.workers.rank == 0:
            pending_calls = self._services.request_peak_memory()
            if run.config.rollout.has_requests_in_flight:
                # The replicas are sampling, so read the replies that the last push requested.
                pending_calls, self._memory = self._memory, pending_calls
            # A broken replica is reported by the code that needs it, so ignore it here.
            memory_by_role |= {
                role: survivors(calls, lost_error=DeploymentError)
                for role, calls in pending_calls.items()
            }
            memory_by_role["driver"] = run.tell.driver_memory()
        return {
            f"perf/{kind}_{role}_gb": max(peak[kind] for peak in peaks if kind in peak)
            for role, peaks in memory_by_role.items()
            for kind in sorted({kind for peak in peaks for kind in peak})
        }
