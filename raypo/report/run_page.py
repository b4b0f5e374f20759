"""The page of one run, or of several on the same axes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from raypo.config import ConfigError
from raypo.config.base import flatten
from raypo.metrics.clock import duration
from raypo.metrics.headlines import HEADLINES, before_and_after, reference
from raypo.report.change import held_out_change, held_out_scores, lead_words
from raypo.report.charts import bar_chart, line_chart, scatter_chart, stacked_chart
from raypo.report.page import (
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
    phase_words,
    short,
)
from raypo.storage.run_files import RunFiles
from raypo.tracking.warnings import findings, seconds_by_phase

_TILES = (
    ("eval/score_mean", "held-out score"),
    ("rollout/score_mean", "training score"),
    ("eval/accuracy", "held-out accuracy"),
    ("eval/loss", "held-out loss"),
    ("train/loss", "training loss"),
    ("kl/ref_response_mean", "KL, nats per response"),
    ("rollout/response_tokens_mean", "response tokens"),
    ("ppo/entropy", "entropy, nats per token"),
    ("ppo/clip_fraction", "clipped tokens"),
    ("perf/response_tokens_per_s", "response tokens per second"),
    ("time/step_s", "seconds per step"),
)


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

Rows = Sequence[Mapping[str, Any]]
RowsByRun = Mapping[str, Rows]


@dataclass(frozen=True)
class RunData:
    """What a run has left so far."""

    name: str
    files: RunFiles
    config: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    status: str
    """finished | failed | interrupted | running | unfinished (killed, or it cannot be seen)."""


def load_run(location: str) -> RunData:
    """A run by its folder or URI, whatever it has so far.

    Raises:
        ConfigError: there is no run.
    """
    files = RunFiles.at(location)
    config, rows, summary = files.config() or {}, files.metrics(), files.summary() or {}
    if not config and not rows:
        raise ConfigError(
            f"RUN ({location}): no run is there, neither config.yaml nor metrics.jsonl. Give the "
            "folder that `raypo train` names at its end: <storage_path>/<name>."
        )
    status = "running" if files.is_running() else summary.get("status", "unfinished")
    return RunData(str(config.get("name") or files.name), files, config, summary, rows, status)


def run_page(runs: Sequence[RunData], *, with_samples: bool = True) -> Page:
    """The page: headline, warnings, curves, time, samples, config, versions."""
    names = [run.name for run in runs]
    named = {  # a name that comes twice gets its folder
        run.name if names.count(run.name) == 1 else run.files.location: run for run in runs
    }
    rows = {name: run.rows for name, run in named.items()}
    curves = {name: with_the_start(each) for name, each in rows.items()}
    written = time.strftime("%Y-%m-%d %H:%M")
    page = Page(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        subtitle=f"raypo report, written {written}",
        badge=runs[0].status if len(runs) == 1 else "",
    )
    _headline(page.section("Result"), named)
    _warnings(page.section("Warnings"), named)
    if len(runs) == 1 and with_samples:
        before_and_after_texts(page.section("What it did to the texts"), runs[0].files)
    _learning(page.section("Learning"), curves, runs)
    _distance(page.section("Distance from the reference", _KL_NOTE), rows)
    _texts(page.section("Length and entropy"), rows)
    _updates(page.section("Updates"), rows)
    _cost(page.section("Time and memory"), named)
    if with_samples:
        samples = [s for run in runs for s in run_samples(run.files, run.config)]
        if samples:
            page.section("Samples", _SAMPLES_NOTE).add(Samples(samples))
    if any(rows.values()):
        page.section("Any metric").add(Explorer(rows))
    _config(page.section("Config and versions"), named)
    return page


_KL_NOTE = (
    "Score against KL is what the run paid for its gain: up is better, right is further away. "
    "A path that goes right without going up is drift; one that comes down is a reward gamed or a "
    "policy lost."
)
_SAMPLES_NOTE = (
    "Samples of some steps. A trained token's colour is its advantage (what the update made more, "
    "blue, or less likely, orange) or its change of log-probability since the reference. Held-out "
    "prompts come again in every evaluation."
)


def with_the_start(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows after a row of step 0 for what was measured before the first update."""
    start = {
        name.replace("/initial_", "/"): value
        for name, value in (rows[0] if rows else {}).items()
        if "/initial_" in name
    }
    return [{"step": 0, **start}, *rows] if start else rows


def _start(rows: RowsByRun, *names: str) -> dict[str, float]:
    """The first of the metrics that each run measured before its first update."""
    found: dict[str, float] = {}
    for run, each in rows.items():
        for name in names:
            first = next((row for row in each[:2] if name in row), {})
            is_before = first.get("step") == 0 or (
                first.get("step") == 1 and name.startswith("rollout/")  # sampled anew each step
            )
            if run not in found and is_before:
                found[run] = first[name]
    return found


def _headline(section: Section, runs: Mapping[str, RunData]) -> None:
    for name, run in runs.items():
        wall_s, held_out = run.summary.get("wall_s"), held_out_change(run.files)
        sentences = headline(run.rows, run.status, wall_s, run.config, held_out)
        prefix = f"{name}: " if len(runs) > 1 else ""
        section.add(Words(prefix + " ".join(sentences[:2]), strong=True))
        if sentences[2:]:
            section.add(Words(" ".join(sentences[2:])))
    if len(runs) == 1:
        (only,) = runs.values()
        section.add(Tiles(_tiles(only.rows)))
        return
    section.add(Words(_comparison(runs), strong=True))
    shown = [
        each for each in _TILES if any(before_and_after(r.rows, each[0]) for r in runs.values())
    ]
    section.add(
        Table(
            ["run", "status", "steps", *(label for _, label in shown)],
            [
                [name, run.status, len(run.rows), *(_change(run.rows, m) for m, _ in shown)]
                for name, run in runs.items()
            ],
        )
    )


def _comparison(runs: Mapping[str, RunData]) -> str:
    """Which run ended with the best held-out score, where they answered the same prompts."""
    last = {name: (run.files.rollout_steps(held_out=True) or [0])[-1] for name, run in runs.items()}
    if not all(last.values()):
        return "Which of them is best cannot be told: not all have held-out answers from training."
    if len({str(_judges(run.config)) for run in runs.values()}) > 1:
        return "Which of them is best cannot be told: their held-out scores have different judges."
    scores = {name: held_out_scores(run.files, last[name]) for name, run in runs.items()}
    if len({frozenset(each) for each in scores.values()}) > 1 or not all(scores.values()):
        return "Which of them is best cannot be told: their held-out prompts are not the same."
    return lead_words(scores, steps=last)


def _judges(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides a held-out score."""
    evaluation = config.get("eval") or {}
    function, held_out = evaluation.get("function"), own_functions(evaluation)
    if function:
        return function, held_out
    models = (config.get("model") or {}).get("reward")
    return config.get("reward"), models, held_out, own_functions(config.get("data") or {})


def _tiles(rows: Rows) -> list[tuple[str, str, str]]:
    tiles = []
    for name, label in _TILES:
        change = before_and_after(rows, name)
        if change is None:
            continue
        is_rate = reference(rows, name) is None and name.startswith(("perf/", "time/"))
        was = "last step" if is_rate else f"was {number(change[0])}"
        tiles.append((label, number(change[1]), was))
    return tiles


def _change(rows: Rows, name: str) -> str:
    change = before_and_after(rows, name)
    return f"{number(change[0])} → {number(change[1])}" if change else ""


def _warnings(section: Section, runs: Mapping[str, RunData]) -> None:
    notices = [
        (f"{name}, step {f.step}" if len(runs) > 1 else f"step {f.step}", f.text, f.remedy)
        for name, run in runs.items()
        for f in findings(run.rows, run.config)
    ]
    is_ppo = any("ppo/policy_loss" in row for run in runs.values() for row in run.rows[:1])
    watched = "KL, length, clipping, engine against learner, groups, entropy, phases"
    watched = watched if is_ppo else "updates that had to be skipped"
    if any(run.rows for run in runs.values()):
        section.add(Notices(notices, none=f"None: raypo watches {watched}."))


def _learning(section: Section, rows: RowsByRun, runs: Sequence[RunData]) -> None:
    judges = {judge_of_held_out(run.config) for run in runs}
    trained, held_out = "rollout/score_mean", "eval/score_mean"
    if judges == {None}:  # one judge, one axis
        _scores(section, "Score", rows, {trained: "trained on", held_out: "held out"}, wide=True)
    else:
        (judge,) = judges if len(judges) == 1 else ("several judges",)
        note = f"by {short(str(judge))}"
        models = {trained: "trained on", "eval/reward_model_mean": "held out, reward model"}
        _scores(section, "Held-out score", rows, {held_out: "held out"}, note=note)
        _scores(section, "Score that it trains on", rows, models)
    drawn = {trained, held_out}
    for name, label, _ in HEADLINES:
        if name not in drawn:
            section.add(
                line_chart(
                    label.capitalize(),
                    rows,
                    name,
                    reference=_start(rows, name),
                    reference_name="before the first update",
                )
            )
    _preferences(section, rows)
    metrics = dict.fromkeys(name for each in rows.values() for row in each for name in row)
    passes = {n: n.removeprefix("eval/") for n in metrics if n.startswith("eval/pass_at_")}
    section.add(
        line_chart("Held out, pass@k", rows, passes),
        line_chart("Spread of the scores", rows, "rollout/score_std", y_title="std over samples"),
    )


def _preferences(section: Section, rows: RowsByRun) -> None:
    """What the recipe dpo makes of chosen and rejected responses; held out where it is known."""
    for title, figure, unit in (
        ("Implicit rewards", "reward_mean", "beta x log-ratio"),
        ("Log-probabilities", "log_prob_mean", "nats per response"),
    ):
        names = {
            f"{group}/{kind}_{figure}": f"{kind}, {words}"
            for group, words in (("eval", "held out"), ("train", "training"))
            for kind in ("chosen", "rejected")
        }
        section.add(line_chart(title, rows, names, y_title=unit))
    margins = {"eval/margin_mean": "held out", "train/margin_mean": "training"}
    section.add(line_chart("Margin: chosen less rejected", rows, margins, y_title="reward"))


def _scores(
    section: Section,
    title: str,
    rows: RowsByRun,
    metrics: dict[str, str],
    **options: Any,
) -> None:
    """A chart of scores with a dashed line where they started."""
    names = sorted(metrics, key=lambda name: not name.startswith("eval/"))
    chart = line_chart(
        title,
        rows,
        metrics,
        y_title="mean score",
        reference=_start(rows, *names),
        reference_name="at the start",
        **options,
    )
    section.add(chart)


def _distance(section: Section, rows: RowsByRun) -> None:
    score, kl = "rollout/score_mean", "kl/ref_response_mean"
    section.add(
        scatter_chart(
            "Score against KL",
            rows,
            kl,
            score,
            x_title="nats per response from the reference",
            y_title="mean score",
        ),
        line_chart("KL to the reference", rows, kl, y_title="nats per response"),
        line_chart("KL coefficient", rows, "kl/coef")
        if len({row.get("kl/coef") for each in rows.values() for row in each}) > 1
        else None,
    )


def _texts(section: Section, rows: RowsByRun) -> None:
    lengths = {"rollout/response_tokens_mean": "mean", "rollout/response_tokens_max": "longest"}
    cut = {"rollout/truncated_fraction": ""}
    section.add(
        line_chart("Response length", rows, lengths, y_title="tokens"),
        line_chart("Entropy", rows, "ppo/entropy", y_title="nats per token"),
        line_chart("Cut off at max_new_tokens", rows, cut, y_title="share of responses"),
        line_chart(
            "Groups whose samples all score the same",
            rows,
            "rollout/zero_variance_fraction",
            y_title="share of groups",
        ),
    )


def _updates(section: Section, rows: RowsByRun) -> None:
    norms = {"ppo/policy_grad_norm": "policy", "ppo/critic_grad_norm": "critic"}
    selected = {
        "selection/responses": "responses",
        "selection/pairs": "pairs",
        "selection/prompts_without": "prompts without",
    }
    section.add(
        line_chart("Selected in a round", rows, selected, y_title="of all workers"),
        line_chart("Score of what was selected", rows, "selection/score_mean"),
        line_chart("Score gap of the pairs", rows, "selection/score_gap_mean"),
        line_chart("What the teacher told", rows, "train/teacher_told", y_title="probability"),
        line_chart("Clipped tokens", rows, "ppo/clip_fraction", y_title="share"),
        line_chart("KL of an update", rows, "ppo/approx_kl", y_title="nats per token"),
        line_chart("Value loss", rows, "ppo/value_loss"),
        line_chart(
            "Variance of the returns that the critic explains", rows, "ppo/explained_variance"
        ),
        line_chart("Gradient norms", rows, norms),
        line_chart("Gradient norm", rows, "train/grad_norm"),
        line_chart("KL that KTO compares with", rows, "train/kl", y_title="nats per response"),
        line_chart("Learning rate", rows, "train/learning_rate"),
        line_chart("Engine against learner", rows, "mismatch/kl", y_title="nats per token"),
    )
    lags = {"rollout/staleness_mean": "mean", "rollout/staleness_max": "oldest"}
    if any(row.get("rollout/staleness_max") for each in rows.values() for row in each):
        section.add(
            line_chart("Age of the samples", rows, lags, y_title="updates since they were sampled")
        )


def _cost(section: Section, runs: Mapping[str, RunData]) -> None:
    """What it cost: seconds by phase, rates, the share of the devices that was used, memory."""
    rows = {name: run.rows for name, run in runs.items()}
    seconds = {}
    for name, run in runs.items():
        by_phase = {phase_words(p): took for p, took in seconds_by_phase(run.rows).items()}
        outside_s = outside_steps(run.rows, run.summary.get("wall_s"))
        is_known = run.rows and outside_s
        seconds[name] = by_phase | ({"start and end": outside_s} if is_known else {})
    section.add(bar_chart("Seconds by phase, all steps", seconds, x_title="seconds"))
    section.add(
        line_chart(
            "Response tokens per second", rows, "perf/response_tokens_per_s", y_title="tokens"
        )
    )
    if len(rows) == 1:
        (each,) = rows.values()
        phases = {name: phase_words(name) for name in seconds_by_phase(each)}
        section.add(stacked_chart("Seconds by step", each, phases, y_title="seconds", wide=True))
    else:
        section.add(line_chart("Seconds per step", rows, "time/step_s", y_title="seconds"))
    waits = {
        "time/wait_for_rollouts_s": "the learner, for rollouts",
        "perf/wait_for_engines_s": "the learner, before a push",
        "perf/engine_idle_s": "the engines",
    }
    if any(name in row for each in rows.values() for row in each for name in waits):
        section.add(line_chart("Who waits", rows, waits, y_title="seconds of a step"))
    memory = {run: _memory(each) for run, each in rows.items()}
    section.add(
        line_chart("Tokens per second while it lasts", rows, _PHASE_RATES, y_title="tokens"),
        line_chart("Model FLOPs utilisation", rows, _UTILISATION, y_title="share", note=_MFU_NOTE),
        bar_chart("Peak memory by role", memory, x_title="GB"),
    )


def _memory(rows: Rows) -> dict[str, float]:
    """The peak of each role's largest process: of RAM, and of a GPU where it uses one."""
    peaks: dict[str, float] = {}
    for kind, suffix in (("memory", ""), ("gpu_memory", ", GPU")):
        for row in rows:
            for name, value in row.items():
                if name.startswith(f"perf/{kind}_"):
                    role = name.removeprefix(f"perf/{kind}_").removesuffix("_gb")
                    label = f"{role.replace('_', ' ')}{suffix}"
                    peaks[label] = max(peaks.get(label, 0.0), value)
    return peaks


def _config(section: Section, runs: Mapping[str, RunData]) -> None:
    if len(runs) > 1:
        flat = {name: flatten(run.config) for name, run in runs.items()}
        keys = sorted(set().union(*flat.values()))
        rows = [[key, *(each.get(key, "") for each in flat.values())] for key in keys]
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
            *([package, each] for package, each in versions.items()),
        ]
        section.add(Table(["run" + suffix, ""], facts))
        if run.config:
            text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
            section.add(Details(f"config.yaml{suffix}", text))
