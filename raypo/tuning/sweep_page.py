"""HTML page of a sweep: the best trial, all trials, and their cost.

This module does not import Ray.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypo.config.sweep_config import SweepConfig
from raypo.metrics.catalogue import label_of
from raypo.report.charts import (
    chart_of,
    line_chart,
    new_figure,
    spans_decades,
)
from raypo.report.page import COLOURS, Chart, Details, Page, Section, Table, Tiles, Words, number
from raypo.report.run_page import with_the_start
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import KL, REWARD_MODEL, SCORE, Goal
from raypo.tuning.held_out import (
    HeldOutChanges,
    best_trial_text,
    gaming_text,
    held_out_changes,
)
from raypo.tuning.record import TrialRecord, best_of, ranked, read_trials
from raypo.tuning.sweep_folder import recorded_sweep, trial_files
from raypo.tuning.view import point_text, status_words, value_text

MAX_LABEL = 40
"""Maximum characters of a label in a legend."""


@dataclass(frozen=True)
class SweepData:
    """Results of a sweep so far."""

    config: SweepConfig
    num_steps: int
    goal: Goal
    status: str
    files: RunFiles
    trials: list[TrialRecord]
    """Trials, best first."""
    rows: dict[str, list[dict[str, Any]]]
    """Metrics of each step, by trial name."""
    changes: Mapping[str, HeldOutChanges]
    """Changes of the held-out scores up to the step of the trial's score, by trial name."""


def load_sweep(files: RunFiles) -> SweepData | None:
    """Load the results so far of a folder's sweep, or None if the folder holds no sweep."""
    recorded_config = recorded_sweep(files)
    if recorded_config is None:
        return None
    config, base = recorded_config
    goal = Goal.of(config)
    trials = ranked(read_trials(files), goal)
    runs = {trial.name: trial_files(files, trial.name) for trial in trials}
    rows = {name: run.metrics() for name, run in runs.items()}
    status = (files.summary() or {}).get("status", "unfinished")
    status = "running" if files.is_running() else status
    changes = {t.name: held_out_changes(runs[t.name], t.scored_step) for t in trials}
    num_steps = base["num_steps"]
    return SweepData(config, num_steps, goal, status, files, trials, rows, changes)


def sweep_page(sweep: SweepData) -> Page:
    """Return the page: result, effect of the values, trials, score against KL, curves."""
    written_at = time.strftime("%Y-%m-%d %H:%M")
    page = Page(
        title=sweep.config.name,
        subtitle=f"raypo report of a sweep of {sweep.config.base}, written {written_at}",
        badge=sweep.status,
    )
    _result(page.section("Result"), sweep)
    _values_effect(page.section("What the values did", _EFFECT_NOTE), sweep)
    _trials(page.section("Trials", _TRIALS_NOTE), sweep)
    _front(page.section("Score against KL", _FRONT_NOTE), sweep)
    curves, labels = page.section("Learning curves"), _labels(sweep)
    for metric in dict.fromkeys([*sweep.goal.metrics, SCORE, REWARD_MODEL, KL]):
        rows_by_label = {
            labels[name]: with_the_start(rows) for name, rows in sweep.rows.items() if rows
        }
        curves.add(line_chart(label_of(metric), rows_by_label, metric))
    best = sweep.files.read("best.yaml")
    if best is not None:
        page.section("Best config").add(Details("best.yaml", best.decode()))
    return page


_EFFECT_NOTE = (
    "The last metrics of each trial, plotted by the value that it tried. Training signals (the "
    "reward model, the KL penalty) appear next to the held-out score: if the reward model's "
    "score rises and the held-out score falls, the policy games the reward model."
)
_TRIALS_NOTE = (
    "Ranked by the step that a score is of, then by the score: scores of different steps are "
    "not compared, so a trial that was stopped early ranks below all trials that continued."
)
_FRONT_NOTE = (
    "No other trial that reached the same step beats a trial on the line in both metrics: a "
    "higher score costs KL. The intervals above are over held-out prompts; they do not include "
    "the variation between seeds."
)


def _result(section: Section, sweep: SweepData) -> None:
    best = best_of(sweep.trials, sweep.goal)
    if best is None:
        section.add(Words("No trial has a score yet.", strong=True))
    else:
        metric = sweep.goal.metrics[0]
        initial_metrics = next(
            (
                rows[0]
                for rows in map(with_the_start, sweep.rows.values())
                if rows and metric in rows[0]
            ),
            {},
        )
        initial_text = (
            f" It was {number(initial_metrics[metric])} before the first update."
            if initial_metrics
            else ""
        )
        best_text = best_trial_text(sweep.trials, sweep.goal, sweep.files)
        section.add(Words(f"{best_text}{initial_text}", strong=True))
        if violated := sweep.goal.broken(best.metrics):
            section.add(
                Words(f"No trial satisfies all constraints; this one violates {violated[0]}.")
            )
    counts = {
        status: sum(t.status == status for t in sweep.trials)
        for status in ("finished", "stopped", "failed")
    }
    total = sum(trial.device_s for trial in sweep.trials)
    section.add(
        Tiles(
            [
                ("trials", str(len(sweep.trials)), f"of {sweep.config.num_trials}"),
                ("to the last step", str(counts["finished"]), f"of {sweep.num_steps} steps"),
                ("stopped early", str(counts["stopped"]), sweep.config.scheduler.kind),
                ("failed", str(counts["failed"]), ""),
                ("device-seconds", number(round(total)), "of all trials"),
            ]
        )
    )


def _values_effect(section: Section, sweep: SweepData) -> None:
    if gaming := gaming_text(sweep.trials, sweep.changes):
        section.add(Words(gaming, strong=True))
    for key, domain in sweep.config.space.items():
        for metric in dict.fromkeys([*sweep.goal.metrics, SCORE, REWARD_MODEL, KL]):
            log_x = domain.kind == "loguniform"
            section.add(_value_chart(sweep.trials, key, metric, log_x=log_x))


def _value_chart(
    trials: Sequence[TrialRecord], key: str, metric: str, *, log_x: bool
) -> Chart | None:
    measured_trials = [trial for trial in trials if metric in trial.metrics and key in trial.point]
    if not measured_trials:
        return None
    is_number = all(isinstance(trial.point[key], int | float) for trial in measured_trials)
    if is_number:
        measured_trials = sorted(measured_trials, key=lambda trial: trial.point[key])
    values = [trial.point[key] if is_number else str(trial.point[key]) for trial in measured_trials]
    log_x = log_x or spans_decades(values)  # a grid or choice may span decades
    figure = new_figure(key, xaxis_type="log" if log_x else None)
    figure.add_scatter(
        x=values,
        y=[trial.metrics[metric] for trial in measured_trials],
        text=[
            f"{t.name}, {t.status} at step {t.step}, score of {t.scored_step}"
            for t in measured_trials
        ],
        mode="markers",
        marker_color=COLOURS[0],
        marker_size=10,
        marker_symbol=[
            "circle-open" if trial.status == "stopped" else "circle" for trial in measured_trials
        ],
        hovertemplate="%{text}<br>%{x:.4g}: %{y:.4g}<extra></extra>",
    )
    title = f"{label_of(metric)} by {key}"
    hollow = any(trial.status == "stopped" for trial in measured_trials)
    note = "Hollow: stopped early." if hollow else ""
    return chart_of(title, figure, note=note)


def _trials(section: Section, sweep: SweepData) -> None:
    keys = list(sweep.config.space)
    names = dict.fromkeys([*sweep.goal.named, SCORE, REWARD_MODEL, KL])
    shown_metrics = [name for name in names if any(name in trial.metrics for trial in sweep.trials)]
    headings = ["rank", "trial", "status", "steps", "score at step", *keys]
    headings += [*(label_of(name) for name in shown_metrics), "device-seconds"]
    has_errors = any(trial.error for trial in sweep.trials)
    headings += ["error"] if has_errors else []
    section.add(
        Table(
            headings,
            [
                [
                    rank,
                    trial.name,
                    status_words(trial, sweep.goal),
                    trial.step,
                    trial.scored_step,
                    *(value_text(trial.point.get(key, "")) for key in keys),
                    *(trial.metrics.get(name) for name in shown_metrics),
                    round(trial.device_s),
                    *([trial.error] if has_errors else []),
                ]
                for rank, trial in enumerate(sweep.trials, start=1)
            ],
        )
    )


def _front(section: Section, sweep: SweepData) -> None:
    metric = SCORE if SCORE in sweep.goal.metrics else sweep.goal.metrics[0]
    if metric == KL:
        return
    measured_trials = [t for t in sweep.trials if metric in t.metrics and KL in t.metrics]
    if not measured_trials:
        return
    mode = dict(zip(sweep.config.metric, sweep.config.mode, strict=True)).get(metric, "max")
    goal = Goal((metric, KL), (1.0 if mode == "max" else -1.0, -1.0))
    rows = sorted(goal.front([trial.judged for trial in measured_trials]))
    front = sorted((measured_trials[row] for row in rows), key=lambda trial: trial.metrics[KL])
    figure = new_figure(label_of(KL), label_of(metric), showlegend=True)
    other_trials = [trial for trial in measured_trials if trial not in front]
    for name, mode, colour, trials in (
        ("Pareto front", "lines+markers", COLOURS[1], front),
        ("trials", "markers", COLOURS[0], other_trials),
    ):
        figure.add_scatter(
            x=[trial.metrics[KL] for trial in trials],
            y=[trial.metrics[metric] for trial in trials],
            text=[f"{trial.name}, {point_text(trial.point)}" for trial in trials],
            name=name,
            mode=mode,
            line_color=colour,
            marker_size=10,
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
        )
    section.add(chart_of(f"{label_of(metric)} against KL", figure, wide=True))


def _labels(sweep: SweepData) -> dict[str, str]:
    """Return each trial's label: its values if all are short and distinct, otherwise its name."""
    texts = {trial.name: point_text(trial.point) for trial in sweep.trials}
    is_short = all(len(text) <= MAX_LABEL for text in texts.values())
    if is_short and len(set(texts.values())) == len(texts):
        return texts
    return {name: name for name in texts}
