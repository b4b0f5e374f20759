"""Which samples of a run go into its page, and their tokens as texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypo.storage.run_files import RunFiles

MAX_STEPS = 20
MAX_SAMPLES = 1200
"""Of one run in the page."""
MAX_TOKENS = 250_000
"""Over all samples of one run in the page; about 2 MB of it."""
MAX_HELD_OUT_STEPS = 8
MAX_HELD_OUT_PROMPTS = 32
MAX_HELD_OUT_TOKENS = 50_000
"""Over all held-out samples of one run in the page."""
MAX_RESPONSE_TOKENS = 2000
"""Of one response; the rest is left out and counted."""


def run_samples(files: RunFiles, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Held-out samples, and trained ones of evenly chosen steps.

    Of the trained ones recurring prompts whole, then best, worst and longest.
    """
    decoder = _Decoder.of(files, config)
    chosen = _evenly(files.rollout_steps(), MAX_STEPS)
    by_step = {step: files.rollouts(step) for step in chosen}
    seen = Counter(
        prompt for rows in by_step.values() for prompt in {row["prompt_index"] for row in rows}
    )
    samples = _held_out(files, decoder)
    room = MAX_TOKENS
    for position, (step, rows) in enumerate(by_step.items()):
        steps_left = len(by_step) - position
        share = room // steps_left
        for row in choose(rows, seen, count=MAX_SAMPLES // len(by_step)):
            cost = min(len(row["response_ids"]), MAX_RESPONSE_TOKENS)
            if share - cost < 0:
                break
            share, room = share - cost, room - cost
            samples.append(_sample(row, step, files.name, decoder))
    return samples


def _held_out(files: RunFiles, decoder: _Decoder | None) -> list[dict[str, Any]]:
    """The same held-out prompts over some evaluations."""
    samples: list[dict[str, Any]] = []
    room = MAX_HELD_OUT_TOKENS
    steps = _evenly(files.rollout_steps(held_out=True), MAX_HELD_OUT_STEPS)
    for position, step in enumerate(steps):
        rows = files.rollouts(step, held_out=True)
        groups = set(_evenly(sorted({row["group_index"] for row in rows}), MAX_HELD_OUT_PROMPTS))
        share = room // (len(steps) - position)
        for row in (each for each in rows if each["group_index"] in groups):
            cost = min(len(row["response_ids"]), MAX_RESPONSE_TOKENS)
            if share - cost < 0:
                break
            share, room = share - cost, room - cost
            samples.append(_sample(row, step, files.name, decoder) | {"held_out": True})
    return samples


def choose(
    rows: Sequence[Mapping[str, Any]], seen: Mapping[int, int], *, count: int
) -> list[Mapping[str, Any]]:
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
    chosen: dict[tuple[int, int], Mapping[str, Any]] = {}
    for row in wishes:
        if len(chosen) >= count:
            break
        chosen.setdefault((row["group_index"], row["sample_index"]), row)
    return [chosen[key] for key in sorted(chosen)]


def _sample(
    row: Mapping[str, Any], step: int, run: str, decoder: _Decoder | None
) -> dict[str, Any]:
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
    if decoder is not None:
        sample["tokens"] = decoder.pieces(ids)
    if row.get("advantages") is not None:
        sample["advantages"] = [_rounded(value) for value in row["advantages"][: len(ids)]]
    if row["ref_log_probs"] is not None:
        pairs = zip(row["log_probs"], row["ref_log_probs"], strict=True)
        sample["changes"] = [_rounded(now - before) for now, before in pairs][: len(ids)]
    return {key: value for key, value in sample.items() if value is not None}


class _Decoder:
    """Token ids to the texts that they add, with the `tokenizers` library alone."""

    def __init__(self, content: bytes) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_buffer(content)

    @classmethod
    def of(cls, files: RunFiles, config: Mapping[str, Any]) -> _Decoder | None:
        """The decoder of a run's saved policy, else of the policy it started from, else None."""
        content = files.tokenizer_json()
        if content is None:
            path = Path(str((config.get("model") or {}).get("policy", ""))) / "tokenizer.json"
            content = path.read_bytes() if path.is_file() else None
        return None if content is None else cls(content)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A text for each token; of a character over several tokens the last one has it."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, int(each)) or "" for each in ids]


def _evenly(values: Sequence[int], count: int) -> list[int]:
    """At most `count` values with even gaps, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    last = len(values) - 1
    return [values[round(position * last / (count - 1))] for position in range(count)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else json.loads(f"{value:.3g}") if value == value else None
