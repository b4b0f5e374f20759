"""Grafana dashboard of raypo's metrics."""

from __future__ import annotations

from itertools import count
from typing import Any

from raypo.metrics.catalogue import PLOTS, Plot
from raypo.tracking.sinks import prometheus_name

UID = "raypo"
PHASES = "Seconds by phase"
ROWS: dict[str, tuple[Plot, ...]] = {
    "Overview": (
        Plot("Score", ["rollout/score_mean", "eval/score_mean"]),
        Plot("Step", ["step"]),
        Plot(PHASES, ["time/*"], "s"),
        Plot("Peak memory by role", ["perf/memory_*", "perf/gpu_memory_*"], "decgbytes"),
    ),
    "Deployments": (
        Plot("Requests at the engines", ["engine/queued", "engine/running"]),
        Plot("Calls at the replicas of engines and models", ["replica/calls"]),
        Plot("KV cache in use", ["engine/kv_cache_use"], "share"),
        Plot("Tokens per second while sampling", ["engine/tokens_per_s"]),
    ),
    **PLOTS,
}
"""Panels by row: an overview, the current replicas, and a row for each section of the report."""
REPLICAS = ("engine", "replica")
"""Prefixes of the metrics that replicas export continuously, not once per step. Each is labelled
with the name of the replica's actor, and other metrics with the name of the run."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def expression(metric: str, selector: str | None = None) -> str:
    """Return the PromQL selector of a metric, or of a pattern of metrics.

    Args:
        metric: Name or pattern of a metric.
        selector: Label matchers. None selects the runs that are chosen in the dashboard.
    """
    if selector is None:
        kind = _label_of(metric)
        selector = 'run=~"$run"' if kind == "run" else f'{kind}=~"raypo:($run):.*"'
    name = f"ray_{prometheus_name(metric)}"
    if "*" not in metric:
        return f"{name}{{{selector}}}"
    pattern = f'__name__=~"{name.replace("*", ".*")}", __name__!~".*(_initial_.*|_time_step_s)"'
    return f"{{{pattern}, {selector}}}"


def _label_of(metric: str) -> str:
    kind = metric.partition("/")[0]
    return kind if kind in REPLICAS else "run"


def grafana_dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON, with a line per run and a run selector at the top."""
    numbers, panels, y = count(1), list[dict[str, Any]](), 0
    for title, plots in ROWS.items():
        head = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append({"id": next(numbers), "type": "row", "title": title, "gridPos": head})
        for position, plot in enumerate(plots):
            cell = {"x": 12 * (position % 2), "y": y + 1 + 8 * (position // 2), "w": 12, "h": 8}
            panels.append({"id": next(numbers), "gridPos": cell, **_panel(plot)})
        y += 1 + 8 * ((len(plots) + 1) // 2)
    run = {
        "name": "run",
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values(ray_{prometheus_name('step')}, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": UID,
        "title": "raypo",
        "tags": ["raypo"],
        "timezone": "browser",
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, run]
        },
        "panels": panels,
    }


def _panel(plot: Plot) -> dict[str, Any]:
    unit = "percentunit" if plot.unit.startswith("share") else plot.unit
    defaults: dict[str, Any] = {"unit": unit}
    if plot.title == PHASES:
        stacking = {"mode": "normal", "group": "A"}
        defaults["custom"] = {"fillOpacity": 40, "stacking": stacking}
    return {
        "type": "timeseries",
        "title": plot.title,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": _SOURCE,
                "expr": expression(metric),
                "legendFormat": f"{{{{{_label_of(metric)}}}}} "
                f"{'{{__name__}}' if '*' in metric else metric}",
            }
            for position, metric in enumerate(plot.metrics)
        ],
    }
