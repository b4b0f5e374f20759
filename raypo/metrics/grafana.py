"""raypo's Grafana dashboard, as the JSON that Grafana loads."""

from __future__ import annotations

from typing import Any

from raypo.metrics.sinks import prometheus_name

UID = "raypo"
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Score", "short", ("rollout/score_mean", "eval/score_mean")),
    ("KL to the reference, nats a response", "short", ("kl/ref_response_mean",)),
    ("Response length, tokens", "short", ("rollout/response_tokens_mean",)),
    ("Entropy, nats a token", "short", ("ppo/entropy",)),
    ("Clipped tokens", "percentunit", ("ppo/clip_fraction",)),
    ("KL of an update, nats a token", "short", ("ppo/approx_kl",)),
    ("Loss", "short", ("ppo/policy_loss", "ppo/value_loss", "train/loss", "eval/loss")),
    ("Engine against learner, nats a token", "short", ("mismatch/kl",)),
    ("Response tokens a second", "short", ("perf/response_tokens_per_s",)),
    ("Samples a second", "short", ("perf/samples_per_s",)),
    ("Model FLOPs utilisation", "percentunit", ("perf/mfu", "perf/update_mfu")),
    (
        "Peak memory by role",
        "decgbytes",
        tuple(f"perf/memory_{role}_gb" for role in ("learner", "engine", "reference", "driver")),
    ),
    ("Age of the samples, updates", "short", ("rollout/staleness_mean", "rollout/staleness_max")),
    ("Step", "short", ("step",)),
)
"""Title, Grafana's unit, metrics."""
PHASES = "Seconds by phase"


def expression(metric: str, selector: str = 'run=~"$run"') -> str:
    """A metric as Prometheus has it: Ray's prefix, raypo's name, the runs that are asked for."""
    return f"ray_{prometheus_name(metric)}{{{selector}}}"


def grafana_dashboard() -> dict[str, Any]:
    """The dashboard: a panel a figure, a line a run; runs are chosen at its head."""
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
