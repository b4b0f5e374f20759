"""What a run cost: seconds by phase, rates, the share of the devices that was used, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raypo.report.charts import bar_chart, line_chart, stacked_chart
from raypo.report.page import Section
from raypo.report.verdict import outside_steps, phase_words, seconds_by_phase

Rows = Sequence[Mapping[str, Any]]

_PHASE_RATES = {
    "perf/generate_tokens_per_s": "generate (responses)",
    "perf/evaluate_tokens_per_s": "old log-probs and values",
    "perf/update_tokens_per_s": "update",
}
_UTILISATION = {
    "perf/mfu": "whole step",
    "perf/generate_mfu": "generate",
    "perf/update_mfu": "update",
}
_MFU_NOTE = "FLOPs that the models need, over seconds and the devices' peak FLOP/s"


def cost(section: Section, rows: Mapping[str, Rows], wall_s: Mapping[str, float | None]) -> None:
    """Fill the section, from metrics by step and the seconds of the whole run, each by run."""
    seconds = {
        run: {phase_words(phase): took for phase, took in seconds_by_phase(each).items()}
        | _outside(each, wall_s[run])
        for run, each in rows.items()
    }
    section.add(bar_chart("Seconds by phase, all steps", seconds, x_title="seconds"))
    response_tokens = "perf/response_tokens_per_s"
    section.add(line_chart("Response tokens per second", rows, response_tokens, y_title="tokens"))
    if len(rows) == 1:
        (each,) = rows.values()
        phases = {name: phase_words(name) for name in seconds_by_phase(each)}
        section.add(stacked_chart("Seconds by step", each, phases, y_title="seconds", wide=True))
    else:
        section.add(line_chart("Seconds per step", rows, "time/step_s", y_title="seconds"))
    memory = {run: _memory(each) for run, each in rows.items()}
    section.add(
        line_chart("Tokens per second while it lasts", rows, _PHASE_RATES, y_title="tokens"),
        line_chart("Model FLOPs utilisation", rows, _UTILISATION, y_title="share", note=_MFU_NOTE),
        bar_chart("Peak memory by role", memory, x_title="GB"),
    )


def _outside(rows: Rows, wall_s: float | None) -> dict[str, float]:
    seconds = outside_steps(rows, wall_s)
    return {"start and end": seconds} if rows and seconds else {}


def _memory(rows: Rows) -> dict[str, float]:
    """By role, the peak of its largest process: of RAM, and of a GPU where it uses one."""
    peaks: dict[str, float] = {}
    for kind, suffix in (("memory", ""), ("gpu_memory", ", GPU")):
        for row in rows:
            for name, value in row.items():
                if name.startswith(f"perf/{kind}_"):
                    role = name.removeprefix(f"perf/{kind}_").removesuffix("_gb")
                    label = f"{role.replace('_', ' ')}{suffix}"
                    peaks[label] = max(peaks.get(label, 0.0), value)
    return peaks
