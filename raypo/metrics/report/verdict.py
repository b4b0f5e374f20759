"""What a run did, in words: from its metrics alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raypo.metrics.warnings import phase_seconds

Row = Mapping[str, Any]

HEADLINES: tuple[tuple[str, str, int], ...] = (
    ("eval/score_mean", "held-out score", 1),
    ("eval/accuracy", "held-out accuracy", 1),
    ("eval/loss", "held-out loss", -1),
    ("rollout/score_mean", "score", 1),
    ("train/accuracy", "training accuracy", 1),
    ("train/loss", "training loss", -1),
)
"""Metrics that say whether a run worked, the first that it has counts; and which way is good."""

MIN_START_SHARE = 0.1
"""Share of a run's time that its start must take to be told."""
MIN_STANDARD_ERRORS = 3.0
"""Standard errors that a change of the score must exceed to be called one."""


def before_and_after(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """A metric before the first update and at the end; None where there is none."""
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    start = reference(rows, name)
    if not values:
        return None
    return (values[0] if start is None else start), values[-1]


def reference(rows: Sequence[Row], name: str) -> float | None:
    """A metric before the first update: `eval/initial_score_mean` for `eval/score_mean`.

    What is sampled anew each step has its value of before the first update in the first row.
    """
    if not rows:
        return None
    group, _, metric = name.partition("/")
    stored = rows[0].get(f"{group}/initial_{metric}")
    if stored is None and group == "rollout" and rows[0].get("step") == 1:
        stored = rows[0].get(name)
    return stored if stored is not None and math.isfinite(stored) else None


def headline(
    rows: Sequence[Row],
    status: str,
    wall_s: float | None,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Sentences: how far it came, whether it learned, what it cost, where the time went.

    Args:
        config: The resolved config, which says who judges.
    """
    if not rows:
        done = "no step has ended yet" if status == "running" else "no step ended"
        return [f"The run is {status}; {done}."]
    words = [_progress(rows, status, wall_s)]
    parts = [_learning(rows), _judges(config or {}), _distance(rows), _texts(rows)]
    words += filter(None, [*parts, _time(rows, wall_s)])
    return words


def judge_of_held_out(config: Mapping[str, Any]) -> str | None:
    """The function behind `eval/score_mean`; None where it is what the run trains on."""
    reward, evaluation = config.get("reward") or {}, config.get("eval") or {}
    function = evaluation.get("function") or reward.get("function")
    has_more = bool((config.get("model") or {}).get("reward") or reward.get("url"))
    return function if function != reward.get("function") or has_more else None


def _judges(config: Mapping[str, Any]) -> str:
    """Who judges, where held-out responses are judged otherwise than those that are trained on."""
    held_out = judge_of_held_out(config)
    reward = config.get("reward") or {}
    models = [short(each["path"]) for each in (config.get("model") or {}).get("reward") or ()]
    trained = [short(each) for each in (reward.get("function"), *models) if each]
    trained += [str(each) for each in reward.get("url") or ()]
    if held_out is None or not trained:
        return ""
    judges = " and ".join(trained)
    return f"It trained on the score of {judges}; {short(held_out)} judges the held-out responses."


def short(path: str) -> str:
    """The last two words of a path, for people."""
    return "/".join(path.split("/")[-2:])


def _progress(rows: Sequence[Row], status: str, wall_s: float | None) -> str:
    steps = rows[-1].get("step", len(rows))
    lasted = f" in {duration(wall_s)}" if wall_s else ""
    how = {
        "finished": f"The run finished: {steps} steps{lasted}.",
        "running": f"The run is going on; {steps} steps are done.",
        "failed": f"The run failed after {steps} steps{lasted}; its log is in logs/.",
        "interrupted": f"The run was stopped after {steps} steps{lasted}; it can be resumed.",
    }
    return how.get(status, f"The run is {status} after {steps} steps.")


def _learning(rows: Sequence[Row]) -> str:
    for name, label, sign in HEADLINES:
        change = before_and_after(rows, name)
        if change is None:
            continue
        start, end = change
        verdict = _verdict(rows, name, sign * (end - start))
        moved = "rose" if end > start else "fell" if end < start else "stayed"
        text = f"{verdict} The {label} {moved} from {start:.3f} to {end:.3f}"
        values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
        best = max(values, key=lambda value: sign * value)
        if abs(best - end) > 0.02 * max(abs(best), 1e-9):
            step = next(row["step"] for row in rows if row.get(name) == best)
            text += f" (best {best:.3f} at step {step})"
        return text + "."
    return ""


def _verdict(rows: Sequence[Row], name: str, gain: float) -> str:
    """Whether a gain is one, judged by the spread of the samples where it is known."""
    if name in ("eval/score_mean", "rollout/score_mean"):
        noise = _noise(rows)
        if noise is None:
            return ""
        if gain > MIN_STANDARD_ERRORS * noise:
            return "It learned."
        if gain < -MIN_STANDARD_ERRORS * noise:
            return "It got worse."
        return "It has not clearly learned: the change is within the noise of the samples."
    return "It learned." if gain > 0 else "It has not learned."


def _noise(rows: Sequence[Row]) -> float | None:
    """Standard error of the difference of two steps' mean scores."""
    std, count = rows[-1].get("rollout/score_std"), rows[-1].get("rollout/samples_sampled")
    if std is None or not count or not math.isfinite(std):
        return None
    return math.sqrt(2.0) * std / math.sqrt(count)


def _distance(rows: Sequence[Row]) -> str:
    response = before_and_after(rows, "kl/ref_response_mean")
    token = before_and_after(rows, "kl/ref_mean")
    if response is None:
        return ""
    a_token = f" ({token[1]:.3f} a token)" if token else ""
    return f"It moved {response[1]:.2f} nats a response{a_token} away from the reference."


def _texts(rows: Sequence[Row]) -> str:
    length = before_and_after(rows, "rollout/response_tokens_mean")
    entropy = before_and_after(rows, "ppo/entropy")
    parts = []
    if length:
        same = abs(length[1] - length[0]) < 0.05 * max(length[0], 1.0)
        was = "as at the start" if same else f"{length[0]:.1f} at the start"
        parts.append(f"Responses are {length[1]:.1f} tokens long, {was}")
    if entropy:
        change = "fell" if entropy[1] < entropy[0] else "rose"
        parts.append(f"entropy {change} from {entropy[0]:.2f} to {entropy[1]:.2f} nats a token")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _time(rows: Sequence[Row], wall_s: float | None) -> str:
    seconds = seconds_by_phase(rows)
    total = sum(seconds.values())
    if not total:
        return ""
    outside = outside_steps(rows, wall_s)
    start = ""
    if wall_s and outside > MIN_START_SHARE * wall_s:
        start = f"Starting and ending took {duration(outside)}, the steps {duration(total)}. "
    first = sorted(seconds, key=lambda name: -seconds[name])[:2]
    parts = [f"{phase_words(name)} {seconds[name] / total:.0%}" for name in first]
    return f"{start}Most of the time of its steps went into {' and '.join(parts)}."


def outside_steps(rows: Sequence[Row], wall_s: float | None) -> float:
    """Seconds of a run that no step has: starting engines, loading models, the first evaluation."""
    return max((wall_s or 0.0) - sum(row.get("time/step_s", 0.0) for row in rows), 0.0)


def seconds_by_phase(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds by phase over all steps, in the order of the phases."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in phase_seconds(row).items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


_PHASES = {
    "time/generate_s": "generate",
    "time/score_s": "score",
    "time/evaluate_s": "old log-probs and values",
    "time/save_rollouts_s": "save rollouts",
    "time/update_s": "update",
    "time/push_weights_s": "push weights",
    "time/held_out_s": "held-out score",
    "time/checkpoint_s": "checkpoint",
    "time/report_s": "report",
}


def phase_words(name: str) -> str:
    """A phase for people."""
    return _PHASES.get(name) or name.removeprefix("time/").removesuffix("_s").replace("_", " ")


def duration(seconds: float) -> str:
    """Like `2 min 47 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
