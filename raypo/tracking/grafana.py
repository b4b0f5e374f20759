"""raypo's panels: as the dashboard that Grafana loads, and on Prometheus' own page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from raypo.tracking.sinks import prometheus_name

UID = "raypo"
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Score", "short", ("rollout/score_mean", "eval/score_mean")),
    ("KL to the reference, nats per response", "short", ("kl/ref_response_mean",)),
    ("Response length, tokens", "short", ("rollout/response_tokens_mean",)),
    ("Entropy, nats per token", "short", ("ppo/entropy",)),
    ("Clipped tokens", "percentunit", ("ppo/clip_fraction",)),
    ("KL of an update, nats per token", "short", ("ppo/approx_kl",)),
    ("Loss", "short", ("ppo/policy_loss", "ppo/value_loss", "train/loss", "eval/loss")),
    ("Engine against learner, nats per token", "short", ("mismatch/kl",)),
    ("Response tokens per second", "short", ("perf/response_tokens_per_s",)),
    ("Samples per second", "short", ("perf/samples_per_s",)),
    ("Model FLOPs utilisation", "percentunit", ("perf/mfu", "perf/update_mfu")),
    (
        "Peak memory by role",
        "decgbytes",
        tuple(f"perf/memory_{role}_gb" for role in ("learner", "engine", "reference", "driver")),
    ),
    ("Age of the samples, updates", "short", ("rollout/staleness_mean", "rollout/staleness_max")),
    ("Step", "short", ("step",)),
)
"""The title of each panel, Grafana's name of its unit, and the metrics that it draws."""
PHASES = "Seconds by phase"


def expression(metric: str, selector: str = 'run=~"$run"') -> str:
    """A metric as Prometheus knows it, with Ray's prefix, of the runs that are asked for."""
    return f"ray_{prometheus_name(metric)}{{{selector}}}"


def grafana_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON: a line is a run, and runs are chosen at the head."""
    panels = [_panel(number, *panel) for number, panel in enumerate(PANELS)]
    panels.append(_phases(len(PANELS)))
    return {
        "uid": UID,
        "title": "raypo",
        "tags": ["raypo"],
        "timezone": "browser",
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": f"label_values(ray_{prometheus_name('step')}, run)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


def prometheus_url(port: int) -> str:
    """The address of Prometheus' own page with the first four panels, for want of a Grafana."""
    query: dict[str, str] = {}
    for number, (_, _, metrics) in enumerate(PANELS[:4]):
        query |= {
            f"g{number}.expr": " or ".join(expression(metric, "") for metric in metrics),
            f"g{number}.tab": "0",
            f"g{number}.range_input": "15m",
        }
    return f"http://127.0.0.1:{port}/graph?{urlencode(query)}"


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _panel(number: int, title: str, unit: str, metrics: tuple[str, ...]) -> dict[str, Any]:
    several = len(metrics) > 1
    targets = [
        {
            "refId": chr(ord("A") + position),
            "datasource": _SOURCE,
            "expr": expression(metric),
            "legendFormat": f"{{{{run}}}} {metric}" if several else "{{run}}",
        }
        for position, metric in enumerate(metrics)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": targets,
    }


def _phases(number: int) -> dict[str, Any]:
    panel = _panel(number, PHASES, "s", ("time/step_s",))
    selector = f'__name__=~"ray_{prometheus_name("time/")}.*", run=~"$run"'
    without = f'__name__!="ray_{prometheus_name("time/step_s")}"'
    panel["targets"][0] |= {"expr": f"{{{selector}, {without}}}", "legendFormat": "{{__name__}}"}
    panel["fieldConfig"]["defaults"]["custom"] = {
        "fillOpacity": 40,
        "stacking": {"mode": "normal", "group": "A"},
    }
    return panel
