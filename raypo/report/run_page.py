"""Report page of one run, or of several on the same axes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import yaml

from raypo.config import ConfigError
from raypo.config.base import flatten
from raypo.config.paths import short_name
from raypo.health.rules import RULES, findings
from raypo.health.slowness import seconds_by_phase
from raypo.metrics.catalogue import (
    METRICS,
    PLOTS,
    Metric,
    Plot,
    Row,
    before_and_after,
    label_of,
    reference,
)
from raypo.metrics.clock import duration
from raypo.report.change import (
    held_out_change,
    held_out_evaluations,
    held_out_scores,
    lead_words,
)
from raypo.report.charts import RowsByRun, bar_chart, line_chart, scatter_chart, stacked_chart
from raypo.report.page import (
    Chart,
    Details,
    Explorer,
    Notices,
    Page,
    Samples,
    Section,
    Table,
    Tiles,
    Words,
    number,
)
from raypo.report.samples import before_and_after_texts, run_samples
from raypo.report.verdict import (
    headline,
    judge_of_held_out,
    outside_steps,
    own_functions,
)
from raypo.storage.run_files import RunFiles

RECENT = 10
"""Number of last steps over which an overview tile shows the median of a rate or time."""
_TILES = [metric for metric in METRICS.values() if metric.tile]


@dataclass(frozen=True)
class RunData:
    """A run's files and their content."""

    name: str
    files: RunFiles
    config: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    status: str
    """finished | failed | interrupted | running | unfinished (killed, or its state is not visible
    from here)."""


def load_run(location: str) -> RunData:
    """Load a run, complete or not, from its folder or URI.

    Raises:
        ConfigError: there is no run.
    """
    files = RunFiles.at(location)
    config, rows, summary = files.config() or {}, files.metrics(), files.summary() or {}
    if not config and not rows:
        raise ConfigError(
            f"RUN ({location}): there is no run, neither config.yaml nor metrics.jsonl. Give the "
            "folder that `raypo train` names at its end: <storage_path>/<name>."
        )
    status = "running" if files.is_running() else summary.get("status", "unfinished")
    return RunData(str(config.get("name") or files.name), files, config, summary, rows, status)


def run_page(runs: Sequence[RunData], *, with_samples: bool = True) -> Page:
    """Return the report page: headline, warnings, curves, time, samples, config, versions."""
    names = [run.name for run in runs]
    named = {  # duplicate names are replaced by folders
        run.name if names.count(run.name) == 1 else run.files.location: run for run in runs
    }
    rows = {name: run.rows for name, run in named.items()}
    written = time.strftime("%Y-%m-%d %H:%M")
    page = Page(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=f"raypo report, written {written}",
        badge=runs[0].status if len(runs) == 1 else "",
    )
    curves = {name: with_the_start(metrics_of_run) for name, metrics_of_run in rows.items()}
    evaluations = {name: held_out_evaluations(run.files) for name, run in named.items()}
    _headline(page.section("Result"), named, curves, evaluations)
    _warnings(page.section("Warnings"), named)
    if len(runs) == 1 and with_samples:
        before_and_after_texts(page.section("What it did to the texts"), runs[0].files)
    for title, plots in PLOTS.items():
        section = page.section(title, _KL_NOTE if title.startswith("Distance") else "")
        if title in _OWN_CHARTS:
            section.add(*_OWN_CHARTS[title](named, curves))
        constants = [_constant(plot, curves) for plot in plots]
        drawn = [plot for plot, words in zip(plots, constants, strict=True) if not words]
        section.add(*(_drawn(plot, curves) for plot in drawn))
        if words := "; ".join(filter(None, constants)):
            section.add(Words(f"Not drawn, because they do not change: {words}."))
    if with_samples:
        samples = [s for run in runs for s in run_samples(run.files, run.config)]
        if samples:
            page.section("Samples", _SAMPLES_NOTE).add(Samples(samples))
    if any(rows.values()):
        page.section("Any metric").add(Explorer(rows))
    _config(page.section("Config and versions"), named)
    return page


_KL_NOTE = (
    "Score against KL shows what the gain in score cost in distance from the reference: up is "
    "better, right is further away. A path that goes right without going up is drift; a path "
    "that comes down means reward hacking or a degraded policy."
)
_SAMPLES_NOTE = (
    "Samples of some steps. The colour of a trained token shows its advantage (blue: the update "
    "made it more likely, orange: less likely) or its change in log-probability from the "
    "reference. The same held-out prompts appear in every evaluation."
)


def with_the_start(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prepend a row of step 0 with the metrics measured before the first update, if any."""
    start = {
        name.replace("/initial_", "/"): value
        for name, value in (rows[0] if rows else {}).items()
        if "/initial_" in name
    }
    return [{"step": 0, **start}, *rows] if start else rows


def _start(curves: RowsByRun, *names: str) -> dict[str, float]:
    """Return each run's value of a metric before the first update.

    If several metrics are named, the first of them that has such a value is used.
    """
    starts: dict[str, float] = {}
    for run, rows in curves.items():
        first_rows = [row for row in rows[:2] if row["step"]]  # without the row of `with_the_start`
        for start in (reference(first_rows, name) for name in reversed(names)):
            if start is not None:
                starts[run] = start
    return starts


Evaluations = Mapping[int, Mapping[Any, float]]
"""Held-out score of each prompt, for each evaluation by its step."""


def _headline(
    section: Section,
    runs: Mapping[str, RunData],
    curves: RowsByRun,
    evaluations: Mapping[str, Evaluations],
) -> None:
    charts = _scores(runs, curves)
    for name, run in runs.items():
        wall_s, held_out = run.summary.get("wall_s"), held_out_change(run.files)
        sentences = headline(run.rows, run.status, wall_s, run.config, held_out, evaluations[name])
        prefix = f"{name}: " if len(runs) > 1 else ""
        section.add(Words(prefix + " ".join(sentences[:2]), strong=True))
        if len(runs) == 1:
            section.add(*charts)
        if sentences[2:]:
            section.add(Words(" ".join(sentences[2:])))
    if len(runs) == 1:
        (only,) = runs.values()
        section.add(Tiles(_tiles(only.rows)))
        return
    section.add(Words(_comparison(runs), strong=True), *charts)
    shown = [m for m in _TILES if any(_before_and_after(r.rows, m) for r in runs.values())]
    section.add(
        Table(
            ["run", "status", "steps", *(metric.label for metric in shown)],
            [
                [name, run.status, len(run.rows), *(_change(run.rows, m) for m in shown)]
                for name, run in runs.items()
            ],
        )
    )


def _comparison(runs: Mapping[str, RunData]) -> str:
    """Return a sentence on which run has the best last held-out score.

    If the scores are not comparable, the sentence says why.
    """
    unknown = "It is not decided which run is best:"
    last = {name: (run.files.rollout_steps(held_out=True) or [0])[-1] for name, run in runs.items()}
    if not all(last.values()):
        return f"{unknown} some have no held-out responses from training."
    judges = set[str]()
    for config in (run.config for run in runs.values()):
        trained = config.get("reward"), (config.get("model") or {}).get("reward")
        trained += tuple(own_functions(config.get("data") or {}))
        judges.add(judge_of_held_out(config) or str(trained))
    if len(judges) > 1:
        return f"{unknown} their held-out scores come from different functions."
    scores = {name: held_out_scores(run.files, last[name]) for name, run in runs.items()}
    if len({frozenset(by_prompt) for by_prompt in scores.values()}) > 1 or not all(scores.values()):
        return f"{unknown} their held-out prompts are not the same."
    return lead_words(scores, steps=last)


def _tiles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    tiles = []
    curve = with_the_start([dict(row) for row in rows])
    for metric in _TILES:
        change, name = _before_and_after(rows, metric), metric.name
        if change is None:
            continue
        if reference(rows, name) is None and name.startswith(("perf/", "time/")):
            # The median of several steps, because a single step may be unusual.
            newest = [row[name] for row in rows if name in row][-RECENT:]
            was, value = f"median of {len(newest)} steps", median(newest)
        else:
            first = next(row for row in curve if math.isfinite(row.get(name, math.nan)))
            was, value = f"was {_value(name, change[0])} at step {first['step']}", change[1]
        tiles.append((metric.label, _value(name, value), was))
    return tiles


def _before_and_after(rows: Sequence[Row], metric: Metric) -> tuple[float, float] | None:
    change = before_and_after(rows, metric.name)
    return None if metric.unless_zero and not any(change or ()) else change


def _value(name: str, value: float) -> str:
    """Format a value with three significant digits, and a share in percent."""
    if name.endswith(("_fraction", "/accuracy")):
        percent = 100 * value
        return f"{round(percent, 1) or percent:.3g} %"
    return number(float(f"{value:.3g}"))


def _change(rows: Sequence[Row], metric: Metric) -> str:
    change = _before_and_after(rows, metric)
    return " → ".join(_value(metric.name, value) for value in change or ())


def _warnings(section: Section, runs: Mapping[str, RunData]) -> None:
    notices = []
    for name, run in runs.items():
        prefix = f"{name}, " if len(runs) > 1 else ""
        for f in findings(run.rows, run.config):
            notices.append((f"{prefix}step {f.step}", f.text, f.remedy))
    if any(run.rows for run in runs.values()):
        section.add(Notices(notices, none=f"None: no rule of {len(RULES)} matches."))


NOISE = 1e-7
"""Difference below which values of a metric count as equal. Learning rates are smaller."""


def _constant(plot: Plot, curves: RowsByRun) -> str:
    """Return the title and the values of a plot whose metrics do not change, else nothing."""
    rows = [row for rows_of_run in curves.values() for row in rows_of_run]
    constants: list[float] = []
    for name in plot.lines(name for row in rows for name in row):
        values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
        spread = max(values, default=0.0) - min(values, default=0.0)
        size = max(map(abs, values), default=0.0)
        noise = 1e-6 * size if name.endswith("learning_rate") else max(NOISE, 1e-6 * size)
        if len(values) < 2 or spread > noise:
            return ""
        constants.append(0.0 if size < noise else values[-1])
    words = ", ".join(number(value) for value in dict.fromkeys(constants))
    return f"{plot.title[0].lower()}{plot.title[1:]} ({words})" if constants else ""


def _drawn(plot: Plot, curves: RowsByRun) -> Chart | None:
    """Return a plot of the catalogue, with a dashed line at a held-out metric's initial value."""
    rows = [row for rows_of_run in curves.values() for row in rows_of_run]
    lines = plot.lines(name for row in rows for name in row)
    has_start = len(lines) == 1 and next(iter(lines)).startswith("eval/")
    return line_chart(
        plot.title,
        curves,
        lines,
        y_title=plot.unit,
        reference=_start(curves, *lines) if has_start else None,
        reference_name="before the first update",
    )


def _scores(runs: Mapping[str, RunData], curves: RowsByRun) -> list[Chart | None]:
    """Return the score charts, with a dashed line at each initial value.

    If training and evaluation have different reward functions, each has a separate chart.
    """

    def chart(title: str, metrics: dict[str, str], **options: Any) -> Chart | None:
        start = _start(curves, *sorted(metrics))  # prefers the held-out metric
        return line_chart(title, curves, metrics, y_title="mean score", reference=start, **options)

    judges = {judge_of_held_out(run.config) for run in runs.values()}
    trained, held_out = {"rollout/score_mean": "trained on"}, {"eval/score_mean": "held out"}
    if judges == {None}:  # one grader, one axis
        return [chart("Score", trained | held_out, wide=True)]
    (judge,) = judges if len(judges) == 1 else ("several judges",)
    models = {"eval/reward_model_mean": "held out, reward model"}
    return [
        chart("Held-out score", held_out, note=f"by {short_name(str(judge))}"),
        chart("Training score", trained | models),
    ]


def _score_against_kl(runs: Mapping[str, RunData], curves: RowsByRun) -> list[Chart | None]:
    kl, unit = "kl/ref_response_mean", "nats per response from the reference"
    title, score = "Score against KL", "rollout/score_mean"
    return [scatter_chart(title, curves, kl, score, x_title=unit, y_title="mean score")]


def _cost(runs: Mapping[str, RunData], curves: RowsByRun) -> list[Chart | None]:
    """Return the charts of time (by phase, in total and by step) and of memory by role."""
    seconds = {}
    for name, run in runs.items():
        seconds[name] = {label_of(p): took for p, took in seconds_by_phase(run.rows).items()}
        outside_s = outside_steps(run.rows, run.summary.get("wall_s"))
        if run.rows and outside_s:
            seconds[name]["start and end"] = outside_s
    rows = {name: run.rows for name, run in runs.items()}
    by_step = line_chart("Seconds per step", rows, "time/step_s", y_title="seconds")
    if len(runs) == 1:
        (metrics_of_run,) = rows.values()
        phases = {name: label_of(name) for name in seconds_by_phase(metrics_of_run)}
        by_step = stacked_chart("Seconds by step", metrics_of_run, phases, y_title="seconds")
    memory = {run: _memory(metrics_of_run) for run, metrics_of_run in rows.items()}
    return [
        bar_chart("Seconds by phase, all steps", seconds, x_title="seconds"),
        bar_chart("Peak memory by role", memory, x_title="GB"),
        by_step,
    ]


_OWN_CHARTS = {
    "Distance from the reference": _score_against_kl,
    "Time and memory": _cost,
}
"""Charts by section that come before the plots of metrics by step."""


def _memory(rows: Sequence[Row]) -> dict[str, float]:
    """Return the peak RAM of each role's largest process, and the GPU memory if it uses a GPU."""
    peaks: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if match := re.fullmatch(r"perf/(gpu_)?memory_(.+)_gb", name):
                label = match[2].replace("_", " ") + (", GPU" if match[1] else "")
                peaks[label] = max(peaks.get(label, 0.0), value)
    return peaks


def _config(section: Section, runs: Mapping[str, RunData]) -> None:
    if len(runs) > 1:
        flat = {name: flatten(run.config) for name, run in runs.items()}
        keys = sorted(set().union(*flat.values()))
        rows = [[key, *(values.get(key, "") for values in flat.values())] for key in keys]
        differing = [row for row in rows if len({str(value) for value in row[1:]}) > 1]
        section.add(Words("Keys that differ:"), Table(["key", *flat], differing))
    for name, run in runs.items():
        suffix = f" of {name}" if len(runs) > 1 else ""
        versions, wall_s = run.summary.get("versions", {}), run.summary.get("wall_s")
        facts = [
            ["status", run.status],
            ["recipe", run.config.get("recipe", "")],
            ["files", run.files.location],
            *([["time", duration(wall_s)]] if wall_s else []),
            *([package, version] for package, version in versions.items()),
        ]
        section.add(Table(["run" + suffix, ""], facts))
        if run.config:
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            section.add(Details(f"config.yaml{suffix}", text))
