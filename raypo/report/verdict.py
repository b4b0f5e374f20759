"""Verdict on a run in words, from its metrics and its held-out scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from raypo.config.paths import short_name
from raypo.health.slowness import seconds_by_phase, slowness
from raypo.metrics.catalogue import (
    HEADLINES,
    TRAINED,
    Row,
    before_and_after,
    label_of,
    reference,
)
from raypo.metrics.clock import duration
from raypo.report.change import (
    Change,
    change_over_steps,
    held_out_change,
    held_out_evaluations,
    paired_change,
)
from raypo.storage.run_files import RunFiles
from raypo.storage.summary import sample_totals

MIN_START_SHARE = 0.1
"""Share of a run's duration. The verdict mentions the time outside of steps if it is larger."""


def headline(
    rows: Sequence[Row],
    status: str,
    wall_s: float | None,
    config: Mapping[str, Any] | None = None,
    held_out: tuple[int, int, Change] | None = None,
    evaluations: Mapping[int, Mapping[Any, float]] | None = None,
) -> list[str]:
    """Return sentences on progress, learning, cost and the use of time.

    Args:
        rows: The run's metrics by step.
        status: The run's status.
        wall_s: Duration of the run, in seconds. None means unknown.
        config: The resolved config, which names the reward functions.
        held_out: Steps of the first and the last saved evaluation, and the change of their scores.
        evaluations: Held-out score of each prompt, for each evaluation by its step, in order.
    """
    config = config or {}
    if not rows:
        done = "no step has ended yet" if status == "running" else "no step ended"
        return [f"{_STATUS.get(status, 'The run ended')}; {done}."]
    words = [_progress(rows, status, wall_s)]
    learning = [_learning(rows, config, held_out), _trend(evaluations or {})]
    parts = [" ".join(filter(None, learning)), _judges(config), _distance(rows), _texts(rows)]
    words += filter(None, [*parts, _samples(rows), _time(rows, wall_s, config)])
    return words


def learned(files: RunFiles) -> str:
    """Return the report's sentences on learning, for the console.

    The text is empty if no step has ended, or if scipy (of the extra `report`) is not installed.
    """
    rows = files.metrics()
    if not rows or find_spec("scipy") is None:
        return ""
    learning = _learning(rows, files.config() or {}, held_out_change(files))
    return " ".join(filter(None, [learning, _trend(held_out_evaluations(files))]))


_STATUS = {
    "running": "The run is going on",
    "failed": "The run failed",
    "interrupted": "The run was stopped",
    "unfinished": "The run ended unexpectedly",
}


def judge_of_held_out(config: Mapping[str, Any]) -> str | None:
    """Return the function that computes `eval/score_mean`.

    The result is None if the score in training comes from this function and no other source.
    """
    reward, evaluation = config.get("reward") or {}, config.get("eval") or {}
    trained, held_out = own_functions(config.get("data") or {}), own_functions(evaluation)
    models = (config.get("model") or {}).get("reward")
    has_more = bool(models or reward.get("url") or reward.get("judge"))
    if held_out and held_out != trained and not evaluation.get("function"):
        return ", ".join(held_out)
    function = evaluation.get("function") or reward.get("function")
    return function if function != reward.get("function") or has_more else None


def own_functions(section: Mapping[str, Any]) -> list[str]:
    """Return the reward functions that belong to single prompt sources."""
    entries = [entry for entry in section.get("prompts") or () if isinstance(entry, Mapping)]
    return [entry["function"] for entry in entries if entry.get("function")]


def _judges(config: Mapping[str, Any]) -> str:
    """Name the graders of training and of held-out responses. The text is empty if they agree."""
    held_out = judge_of_held_out(config)
    reward = config.get("reward") or {}
    models = [short_name(each["path"]) for each in (config.get("model") or {}).get("reward") or ()]
    functions = [reward.get("function"), *own_functions(config.get("data") or {})]
    trained = [short_name(each) for each in (*functions, *models) if each]
    trained += [str(each) for each in reward.get("url") or ()]
    if judge := reward.get("judge"):
        trained.append(short_name(judge.get("path") or judge["model"]))
    if held_out is None or not trained:
        return ""
    judges, judge = " and ".join(trained), short_name(held_out)
    return f"It trained on the score of {judges}; {judge} scores the held-out responses."


def _samples(rows: Sequence[Row]) -> str:
    """Describe the outcomes of the samples, unless all of them were trained on."""
    totals = sample_totals(rows)
    if not totals or totals["trained"] == totals["sampled"]:
        return ""
    words = {
        "filtered": "left out by the filter",
        "failed": "not scored or empty",
        "dropped": "dropped as too old",
        "carried": "sampled or in flight for a step that was never trained",
    }
    rest = [f"{totals[name]:,} {text}" for name, text in words.items() if totals[name]]
    again = totals["asked_again"]
    more = f" {again:,} were sampled again after a restart." if again else ""
    return (
        f"Of {totals['sampled']:,} samples {totals['trained']:,} were trained, "
        f"{', '.join(rest)}.{more}"
    )


def _progress(rows: Sequence[Row], status: str, wall_s: float | None) -> str:
    number = rows[-1].get("step", len(rows))
    steps = f"{number} step" if number == 1 else f"{number} steps"
    is_whole = wall_s and wall_s >= seconds_in_steps(rows)  # otherwise it covers only some attempts
    lasted = f" in {duration(wall_s)}" if wall_s and is_whole else ""
    how = {
        "finished": f"The run finished: {steps}{lasted}.",
        "running": f"The run is going on; {steps} {'is' if number == 1 else 'are'} done.",
        "failed": f"The run failed after {steps}{lasted}; its log is in logs/.",
        "interrupted": f"The run was stopped after {steps}{lasted}; the same command resumes it.",
    }
    gone = f"The run ended unexpectedly after {steps}: its process is gone, or not visible"
    return how.get(status, f"{gone} from here. The same command resumes it.")


def _learning(
    rows: Sequence[Row], config: Mapping[str, Any], held_out: tuple[int, int, Change] | None
) -> str:
    """Return the verdict on learning.

    It is based on the held-out scores of the same prompts in two evaluations, if they are saved and
    suffice, and otherwise on a training metric. In the second case, held-out metrics are appended
    without an interval.
    """
    name, label, sign, *_ = next(
        (headline for headline in TRAINED if headline.name in rows[-1]), TRAINED[0]
    )
    trained = change_over_steps(rows, name)
    if held_out is not None and (held_out[2].direction is not None or trained is None):
        return _of_pairs(rows, config, held_out, trained)
    others, got_worse = _held_out_as_measured(rows)
    if held_out is not None:
        others = [f"The {_held_out_text(rows, *held_out)}."]
    if trained is None:
        only = rows[-1].get(name, math.nan)
        if len(rows) == 1 and math.isfinite(only):
            unknown = "so it is unknown whether it learned"
            others.insert(0, f"The {label} was {only:.3f} in its only step, {unknown}.")
        return " ".join(others)
    direction = None if trained.direction is None else sign * trained.direction
    text = f"{label} {_moved(trained.before, trained.after)} ({trained.words})"
    words = _with_verdict(direction, text)
    if direction == 1 and got_worse:
        words = words.replace("It learned.", "It learned only its training examples.", 1)
    return " ".join([words, *others])


def _held_out_as_measured(rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Describe held-out metrics without an interval, and return whether they got worse.

    The loss needs no interval, because it is measured on the same examples each time.
    """
    words, worse = [], set()
    for name, label, sign, *_ in HEADLINES:
        change = before_and_after(rows, name) if name.startswith("eval/") else None
        if change is None:
            continue
        is_first = reference(rows, name) is None and sum(name in row for row in rows) == 1
        words.append(f"The {label} {f'was {change[1]:.3f}' if is_first else _moved(*change)}.")
        if sign * (change[1] - change[0]) < 0:
            worse.add(name)
    only_loss = all("eval/accuracy" not in row for row in rows)
    return words, "eval/loss" in worse and (only_loss or "eval/accuracy" in worse)


def _of_pairs(
    rows: Sequence[Row],
    config: Mapping[str, Any],
    held_out: tuple[int, int, Change],
    trained: Change | None,
) -> str:
    direction, text = held_out[2].direction, _held_out_text(rows, *held_out)
    if trained is None or trained.direction in (None, direction):
        return _with_verdict(direction, text)
    training = f"training score {_moved(trained.before, trained.after)} ({trained.words})"
    if direction == -1 and trained.direction == 1:
        is_gamed = judge_of_held_out(config) is not None
        how = "It games its reward" if is_gamed else "It fits only its training prompts"
        return f"{how}: the {text}, while the {training}."
    return f"{_with_verdict(direction, text)} The {training}."


def _held_out_text(rows: Sequence[Row], first: int, last: int, change: Change) -> str:
    text = f"held-out score {_moved(change.before, change.after)}"
    if first != 0:
        text += f" between steps {first} and {last}"
    elif last != rows[-1]["step"]:
        text += f" by step {last}"
    return f"{text} ({change.words})"


def _trend(evaluations: Mapping[int, Mapping[Any, float]]) -> str:
    """Describe the held-out score over the evaluations: its last third and its maximum.

    The text is empty if there are fewer than three evaluations.
    """
    steps = list(evaluations)
    if len(steps) < 3:
        return ""
    first, last = steps[-max(2, math.ceil(len(steps) / 3))], steps[-1]
    change = paired_change(evaluations[first], evaluations[last])
    means = {step: fmean(scores.values()) for step, scores in evaluations.items()}
    best = max(steps, key=lambda step: means[step])
    when = f"at step {best}" if best else "before the first update"
    parts = [f"was best {when} ({means[best]:.3f})"]
    if change and change.direction is not None:
        how = {1: "was still rising", 0: "was flat", -1: "was falling"}[change.direction]
        parts.insert(0, f"{how} from step {first} to {last}")
    return f"The held-out score {' and '.join(parts)}."


def _with_verdict(direction: int | None, text: str) -> str:
    if direction is None:
        return f"Too little data to say whether it learned: the {text}."
    return f"{_VERDICTS[direction]} The {text}."


_VERDICTS = {1: "It learned.", 0: "No clear change.", -1: "It got worse."}


def _moved(start: float, end: float) -> str:
    before, after = f"{start:.3f}", f"{end:.3f}"
    if before == after:
        return f"stayed at {before}"
    return f"{'rose' if end > start else 'fell'} from {before} to {after}"


def _distance(rows: Sequence[Row]) -> str:
    response = before_and_after(rows, "kl/ref_response_mean")
    token = before_and_after(rows, "kl/ref_mean")
    if response is None:
        return ""
    per_token = f" ({token[1]:.3f} per token)" if token else ""
    return f"It is {response[1]:.2f} nats per response{per_token} away from the reference."


def _texts(rows: Sequence[Row]) -> str:
    length = before_and_after(rows, "rollout/response_tokens_mean")
    entropy = before_and_after(rows, "ppo/entropy")
    parts = []
    if length:
        same = abs(length[1] - length[0]) < 0.05 * max(length[0], 1.0)
        was = "as at the start" if same else f"{length[0]:.1f} at the start"
        parts.append(f"Responses are {length[1]:.1f} tokens long, {was}")
    if entropy:
        parts.append(f"entropy went from {entropy[0]:.2f} to {entropy[1]:.2f} nats per token")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _time(rows: Sequence[Row], wall_s: float | None, config: Mapping[str, Any]) -> str:
    seconds = seconds_by_phase(rows)
    total = sum(seconds.values())
    if not total:
        return ""
    outside = outside_steps(rows, wall_s)
    start = ""
    if wall_s and outside > MIN_START_SHARE * wall_s:
        start = f"Starting and ending took {duration(outside)}, the steps {duration(total)}. "
    if why := slowness(rows, config):
        return f"{start}Speed: {why.text}."
    first = sorted(seconds, key=lambda name: -seconds[name])[:2]
    parts = [f"{label_of(name)} {seconds[name] / total:.0%}" for name in first]
    return f"{start}Most of the time of its steps went into {' and '.join(parts)}."


def outside_steps(rows: Sequence[Row], wall_s: float | None) -> float:
    """Return the seconds outside of steps: engine start, model loading, first evaluation."""
    return max((wall_s or 0.0) - seconds_in_steps(rows), 0.0)


def seconds_in_steps(rows: Sequence[Row]) -> float:
    """Return the total seconds of all steps."""
    return sum(row.get("time/step_s", 0.0) for row in rows)
