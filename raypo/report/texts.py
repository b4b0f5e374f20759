"""What a run did to the texts: the same prompts before and after, or typical samples of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from raypo.report.change import held_out_scores
from raypo.report.page import Section, Table, Words
from raypo.storage.run_files import RunFiles

Row = Mapping[str, Any]
Value = TypeVar("Value")

MAX_PROMPTS = 6
MAX_CHARACTERS = 400
"""Of a text in the table."""
PLACES = {"low": 0.1, "middle": 0.5, "high": 0.9}
"""Where typical samples stand in the order of the scores."""


def before_and_after_texts(section: Section, files: RunFiles) -> None:
    """Fill the section: held-out prompts where they are saved, else samples of two steps."""
    steps = files.rollout_steps(held_out=True)
    if len(steps) > 1:
        _same_prompts(section, files, steps[0], steps[-1])
        return
    steps = files.rollout_steps()
    if len(steps) > 1:
        _typical(section, files, steps[0], steps[-1])


def _same_prompts(section: Section, files: RunFiles, first: int, last: int) -> None:
    before, after = (
        {
            (row["group_index"], row["prompt"]): row
            for row in files.rollouts(step, held_out=True)[::-1]
        }
        for step in (first, last)
    )  # of several samples of a prompt, its first
    shared = [prompt for prompt in before if prompt in after][::-1]
    scores = [held_out_scores(files, step) for step in (first, last)]
    judged = [
        [each[prompt] for each in scores]
        for prompt in shared
        if all(prompt in each for each in scores)
    ]
    up, down = (sum(sign * (b - a) > 0 for a, b in judged) for sign in (1, -1))
    when = "before the first update" if first == 0 else f"after step {first}"
    section.add(
        Words(
            f"Of {len(judged)} held-out prompts, {up} score higher after step {last} than {when}, "
            f"{down} lower, {len(judged) - up - down} the same. Evenly chosen ones:"
        ),
        Table(
            ["prompt", "label", when, "score", f"after step {last}", "score"],
            [
                [
                    _cut(before[prompt]["prompt"]),
                    before[prompt]["label"],
                    _cut(before[prompt]["response"]),
                    before[prompt]["score"],
                    _cut(after[prompt]["response"]),
                    after[prompt]["score"],
                ]
                for prompt in _evenly(shared, MAX_PROMPTS)
            ],
        ),
    )


def _typical(section: Section, files: RunFiles, first: int, last: int) -> None:
    rows = [
        [f"step {step}, {place}", _cut(row["prompt"]), _cut(row["response"]), row["score"]]
        for step in (first, last)
        for place, row in _by_score(files.rollouts(step)).items()
    ]
    words = "Trained samples of the first and the last step: at the lower tenth, the middle and "
    section.add(
        Words(f"{words}the upper tenth of their scores."),
        Table(["", "prompt", "response", "score"], rows),
    )


def _by_score(rows: Sequence[Row]) -> dict[str, Row]:
    scored = sorted((row for row in rows if row["score"] is not None), key=lambda r: r["score"])
    last = len(scored) - 1
    return {name: scored[round(place * last)] for name, place in PLACES.items()} if scored else {}


def _evenly(values: Sequence[Value], count: int) -> list[Value]:
    gap = max(len(values) / count, 1.0)
    return [values[int(place * gap)] for place in range(min(count, len(values)))]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"
