"""Which samples of a run go into its page: texts before and after, and those to browse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raypo.report.change import held_out_scores
from raypo.report.page import Section, Table, Words
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = Mapping[str, Any]
Value = TypeVar("Value")

MAX_STEPS = 20
MAX_SAMPLES = 1200
"""The page has at most so many trained samples of one run."""
MAX_TOKENS = 250_000
"""The trained samples of one run have at most so many tokens together; about 2 MB of the page."""
MAX_HELD_OUT_STEPS = 8
MAX_HELD_OUT_PROMPTS = 32
MAX_HELD_OUT_TOKENS = 50_000
"""The held-out samples of one run have at most so many tokens together."""
MAX_RESPONSE_TOKENS = 2000
"""Of a longer response the rest is left out and counted."""
MAX_PROMPTS = 6
"""The table of texts before and after has at most so many rows."""
MAX_CHARACTERS = 400
"""A longer text is cut in that table."""
PLACES = {"low": 0.1, "middle": 0.5, "high": 0.9}
"""Typical samples stand at these shares of the order of the scores."""


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
                for prompt in evenly(shared, MAX_PROMPTS)
            ],
        ),
    )


def _typical(section: Section, files: RunFiles, first: int, last: int) -> None:
    rows = [
        [f"step {step}, {place}", _cut(row["prompt"]), _cut(row["response"]), row["score"]]
        for step in (first, last)
        for place, row in typical(files.rollouts(step)).items()
    ]
    words = "Trained samples of the first and the last step: at the lower tenth, the middle and "
    section.add(
        Words(f"{words}the upper tenth of their scores."),
        Table(["", "prompt", "response", "score"], rows),
    )


def typical(rows: Sequence[Row]) -> dict[str, Row]:
    """The rows that stand at PLACES in the order of their scores."""
    scored = sorted((row for row in rows if row["score"] is not None), key=lambda r: r["score"])
    last = len(scored) - 1
    return {name: scored[round(place * last)] for name, place in PLACES.items()} if scored else {}


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


def run_samples(files: RunFiles, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Samples to browse: some held-out prompts over their evaluations, and trained ones.

    The trained ones are of evenly chosen steps: prompts that come again, best, worst and longest.
    """
    tokenizer = tokenizer_of(files, config)
    held_out: dict[int, Sequence[Row]] = {}
    for step in evenly(files.rollout_steps(held_out=True), MAX_HELD_OUT_STEPS):
        rows = files.rollouts(step, held_out=True)
        groups = evenly(sorted({row["group_index"] for row in rows}), MAX_HELD_OUT_PROMPTS)
        held_out[step] = [row for row in rows if row["group_index"] in groups]
    steps = {step: files.rollouts(step) for step in evenly(files.rollout_steps(), MAX_STEPS)}
    seen = Counter(
        prompt for rows in steps.values() for prompt in {row["prompt_index"] for row in rows}
    )
    trained = {
        step: choose(rows, seen, count=MAX_SAMPLES // len(steps)) for step, rows in steps.items()
    }
    return [
        *(
            _sample(row, step, files.name, tokenizer) | {"held_out": True}
            for step, row in _that_fit(held_out, MAX_HELD_OUT_TOKENS)
        ),
        *(
            _sample(row, step, files.name, tokenizer)
            for step, row in _that_fit(trained, MAX_TOKENS)
        ),
    ]


def _that_fit(rows_by_step: Mapping[int, Sequence[Row]], room: int) -> Iterator[tuple[int, Row]]:
    """The first rows of each step, as many as its share of the tokens has room for."""
    for position, (step, rows) in enumerate(rows_by_step.items()):
        share = room // (len(rows_by_step) - position)
        for row in rows:
            cost = min(len(row["response_ids"]), MAX_RESPONSE_TOKENS)
            if cost > share:
                break
            share, room = share - cost, room - cost
            yield step, row


def choose(rows: Sequence[Row], seen: Mapping[int, int], *, count: int) -> list[Row]:
    """At most `count` rows: the prompts seen in most steps, best, worst, longest, then the rest.

    Args:
        rows: The rollouts of a step.
        seen: In how many of the page's steps a prompt occurs.
        count: How many are wanted.
    """
    scored = sorted((row for row in rows if row["score"] is not None), key=lambda r: r["score"])
    edge = max(count // 8, 1)
    recurring = sorted(
        (row for row in rows if seen.get(row["prompt_index"], 0) > 1),
        key=lambda row: (-seen[row["prompt_index"]], row["prompt_index"]),
    )
    longest = sorted(rows, key=lambda row: -len(row["response_ids"]))
    wishes = [*scored[-edge:], *scored[:edge], *longest[:edge], *recurring[: count // 2], *rows]
    chosen: dict[tuple[int, int, int], Row] = {}
    for row in wishes:
        if len(chosen) >= count:
            break
        key = row["group_index"], row["sample_index"], row.get("row_index") or 0
        chosen.setdefault(key, row)
    return [chosen[key] for key in sorted(chosen)]


def _sample(row: Row, step: int, run: str, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = row["response_ids"][:MAX_RESPONSE_TOKENS]
    sample: dict[str, Any] = {
        "run": run,
        "step": step,
        "prompt": row["prompt"],
        "prompt_id": row["prompt_index"],
        "response": row["response"],
        "label": row["label"],
        "score": _rounded(row["score"]),
        "advantage": _rounded(row["advantage_mean"]),
        "kl": _rounded(row["kl"]),
        "finish": row["finish_reason"],
        "num_tokens": len(row["response_ids"]),
    }
    sources = dict(row["scores_by_source"] or [])
    if len(sources) > 1:
        sample["sources"] = {name: _rounded(value) for name, value in sources.items()}
    if tokenizer is not None:
        from tokenizers.decoders import DecodeStream

        # Of a character over several tokens the last one has the text.
        stream = DecodeStream(skip_special_tokens=False)
        sample["tokens"] = [stream.step(tokenizer, int(each)) or "" for each in ids]
    if row.get("advantages") is not None:
        sample["advantages"] = [_rounded(value) for value in row["advantages"][: len(ids)]]
    mask = row.get("response_mask") or [True] * len(row["response_ids"])
    if row["ref_log_probs"] is not None:
        tokens = zip(row["log_probs"], row["ref_log_probs"], mask, strict=True)
        sample["changes"] = [_rounded(a - b) if own else 0.0 for a, b, own in tokens][: len(ids)]
    if not all(mask):
        sample["others"] = [place for place in range(len(ids)) if not mask[place]]
    rewards = row.get("turn_rewards") or []
    told = {t: _rounded(each) for t, each in enumerate(rewards[: len(ids)]) if each}
    sample["rewards"] = told or None
    sample["error"] = (row.get("episode") or {}).get("error")
    sample["turns"] = (row.get("episode") or {}).get("num_turns")
    return {key: value for key, value in sample.items() if value is not None}


@dataclass(frozen=True)
class Turn:
    """What the policy, or the environment between two turns, wrote."""

    by_policy: bool
    text: str
    reward: float = 0.0
    """Of a turn of the policy."""


def turns_of(row: Row, tokenizer: Tokenizer | None) -> list[Turn]:
    """A response turn by turn; one that is no episode, or without a tokenizer, is one turn."""
    mask, rewards = row.get("response_mask"), row.get("turn_rewards")
    told = row.get("turn_index")
    if told is None:  # of a run that is older: what stands between turns tells them apart
        told = [0 if own else -1 for own in mask or ()]
    if not told or tokenizer is None:
        earned = sum(rewards) if rewards else 0.0
        return [Turn(by_policy=True, text=row["response"], reward=earned)]
    found, first = [], 0
    for turn, run in groupby(told):
        last = first + len(list(run))
        text = tokenizer.decode(list(row["response_ids"][first:last]), skip_special_tokens=False)
        earned = sum(rewards[first:last]) if rewards else 0.0
        found.append(Turn(by_policy=turn >= 0, text=text, reward=earned))
        first = last
    return found


def tokenizer_of(files: RunFiles, config: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of a run's saved policy, else of the policy it started from, else None."""
    from tokenizers import Tokenizer

    content = files.read("policy/tokenizer.json")
    if content is None:
        path = Path(str((config.get("model") or {}).get("policy", ""))) / "tokenizer.json"
        content = path.read_bytes() if path.is_file() else None
    return None if content is None else Tokenizer.from_buffer(content)


def evenly(values: Sequence[Value], count: int) -> list[Value]:
    """At most `count` values with even gaps, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    last = len(values) - 1
    return [values[round(position * last / (count - 1))] for position in range(count)]


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.3g}")
