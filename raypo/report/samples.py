"""Selection of samples for a run's page: a table of responses before and after training, and
samples to browse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raypo.report.change import held_out_change
from raypo.report.page import Section, Table, Words
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Row = Mapping[str, Any]
Value = TypeVar("Value")

MAX_STEPS = 20
MAX_SAMPLES = 1200
"""Maximum number of training samples of one run on the page."""
MAX_TOKENS = 250_000
"""Maximum number of tokens in the training samples of one run. They take about 2 MB of the page."""
MAX_HELD_OUT_STEPS = 8
MAX_HELD_OUT_PROMPTS = 32
MAX_HELD_OUT_TOKENS = 50_000
"""Maximum number of tokens in the held-out samples of one run."""
MAX_RESPONSE_TOKENS = 2000
"""Maximum number of tokens shown of a response. The page shows how many are left out."""
MAX_PROMPTS = 6
"""Maximum number of prompts in the table that compares responses before and after training."""
MAX_CHARACTERS = 400
"""Maximum number of characters of a prompt or response in the table that compares responses before
and after training. Longer ones are cut."""


def before_and_after_texts(section: Section, files: RunFiles) -> None:
    """Add a table of held-out responses of the first and the last saved evaluation to the section.

    Nothing is added with fewer than two evaluations, or if no prompt has a score in both.
    """
    compared = held_out_change(files)
    if compared is None:
        return
    first, last, change = compared
    before, after = (
        {
            (row["group_index"], row["prompt"]): row
            for row in files.rollouts(step, held_out=True)[::-1]
            if not row["row_index"]
        }
        for step in (first, last)
    )  # the first sample of each prompt
    shared = [prompt for prompt in before if prompt in after][::-1]

    def num_equal(prompt: Any) -> int:
        pair = before[prompt], after[prompt]
        return sum(pair[0][name] == pair[1][name] for name in ("response", "score"))

    def gain(prompt: Any) -> float:
        scores = before[prompt]["score"], after[prompt]["score"]
        return 0.0 if None in scores else scores[1] - scores[0]

    worse = [prompt for prompt in shared if gain(prompt) < 0]
    share = len(worse) / max(sum(gain(prompt) != 0 for prompt in shared), 1)
    shown_worse = evenly(worse, int(MAX_PROMPTS * max(share, 1 / 3)))
    not_worse = sorted((prompt for prompt in shared if prompt not in worse), key=num_equal)
    shown = sorted([*not_worse[: MAX_PROMPTS - len(shown_worse)], *shown_worse], key=num_equal)
    tokenizer = tokenizer_of(files, files.config() or {})
    when = "before the first update" if first == 0 else f"after step {first}"
    section.add(
        Words(
            f"Held-out scores after step {last} compared with {when}: {change.basis}.",
            strong=True,
        ),
        Words(
            "Examples. Prompts whose score changed come first (at least a third of them worse, "
            "if there are that many), then prompts whose response changed:"
        ),
        Table(
            ["prompt", "label", when, "score", f"after step {last}", "score"],
            [
                [
                    _cut(before[prompt]["prompt"]),
                    before[prompt]["label"],
                    _cut(_response(before[prompt], tokenizer)),
                    before[prompt]["score"],
                    _cut(_response(after[prompt], tokenizer)),
                    after[prompt]["score"],
                ]
                for prompt in shown
            ],
        ),
    )


def _response(row: Row, tokenizer: Tokenizer | None) -> str:
    """Return a response as text. An episode has a line per turn; `<` marks the environment."""
    turns = turns_of(row, tokenizer)
    if len(turns) == 1:
        return row["response"]
    return "\n".join(f"{'' if turn.by_policy else '< '}{turn.text}" for turn in turns)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} …"


def by_sample(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows by sample, in the order in which the samples first appear.

    A sample has several rows if an agent's episode has several conversations.
    """
    samples: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        samples.setdefault((row["group_index"], row["sample_index"]), []).append(row)
    return [sorted(sample, key=lambda row: row["row_index"]) for sample in samples.values()]


def num_tokens(sample: Sequence[Row]) -> int:
    """Return the number of tokens in all responses of a sample."""
    return sum(len(row["response_ids"]) for row in sample)


def run_samples(files: RunFiles, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return samples to browse: those of some held-out prompts, and some training samples.

    Training samples are chosen from evenly spaced steps; see `choose`.
    """
    tokenizer = tokenizer_of(files, config)
    held_out: dict[int, Sequence[Sequence[Row]]] = {}
    for step in evenly(files.rollout_steps(held_out=True), MAX_HELD_OUT_STEPS):
        rows = files.rollouts(step, held_out=True)
        groups = evenly(sorted({row["group_index"] for row in rows}), MAX_HELD_OUT_PROMPTS)
        held_out[step] = by_sample([row for row in rows if row["group_index"] in groups])
    steps = {step: files.rollouts(step) for step in evenly(files.rollout_steps(), MAX_STEPS)}
    seen = Counter(
        prompt for rows in steps.values() for prompt in {row["prompt_index"] for row in rows}
    )
    trained = {
        step: choose(rows, seen, count=MAX_SAMPLES // len(steps)) for step, rows in steps.items()
    }
    return [
        *(
            _sample(each, step, files.name, tokenizer) | {"held_out": True}
            for step, each in _that_fit(held_out, MAX_HELD_OUT_TOKENS)
        ),
        *(
            _sample(each, step, files.name, tokenizer)
            for step, each in _that_fit(trained, MAX_TOKENS)
        ),
    ]


def _that_fit(
    by_step: Mapping[int, Sequence[Sequence[Row]]], room: int
) -> Iterator[tuple[int, Sequence[Row]]]:
    """Yield the samples that fit into the token budget, with an equal share for each step."""
    for position, (step, samples) in enumerate(by_step.items()):
        share = room // (len(by_step) - position)
        for sample in samples:
            cost = sum(min(len(row["response_ids"]), MAX_RESPONSE_TOKENS) for row in sample)
            if cost > share:
                break
            share, room = share - cost, room - cost
            yield step, sample


def choose(rows: Sequence[Row], seen: Mapping[int, int], *, count: int) -> list[list[Row]]:
    """Return at most `count` samples of a step.

    The best, the worst and the longest samples come first, then samples of recurring prompts, then
    all others.

    Args:
        rows: The rollouts of a step.
        seen: Number of the shown steps in which each prompt occurs, by prompt index.
        count: Maximum number of samples.
    """
    samples = by_sample(rows)
    scored = sorted((s for s in samples if s[0]["score"] is not None), key=lambda s: s[0]["score"])
    edge = max(count // 8, 1)
    recurring = sorted(
        (sample for sample in samples if seen.get(sample[0]["prompt_index"], 0) > 1),
        key=lambda sample: (-seen[sample[0]["prompt_index"]], sample[0]["prompt_index"]),
    )
    longest = sorted(samples, key=num_tokens, reverse=True)
    wishes = [*scored[-edge:], *scored[:edge], *longest[:edge], *recurring[: count // 2], *samples]
    chosen: dict[tuple[int, int], list[Row]] = {}
    for sample in wishes:
        if len(chosen) >= count:
            break
        chosen[sample[0]["group_index"], sample[0]["sample_index"]] = sample
    return [chosen[key] for key in sorted(chosen)]


def _sample(
    rows: Sequence[Row], step: int, run: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return a sample for the page: its first conversation, with further ones under `more`."""
    row, *others = rows
    sources = dict(row["scores_by_source"] or [])
    episode = row["episode"] or {}
    metrics = dict(episode.get("metrics") or [])
    sample = _conversation(row, tokenizer) | {
        "run": run,
        "step": step,
        "prompt_id": row["prompt_index"],
        "label": row["label"],
        "score": _rounded(row["score"]),
        "sources": {k: _rounded(v) for k, v in sources.items()} if len(sources) > 1 else None,
        "error": episode.get("error"),
        "turns": episode.get("num_turns"),
        "metrics": {name: _rounded(value) for name, value in metrics.items()} or None,
        "more": [_conversation(other, tokenizer) for other in others] or None,
    }
    return {key: value for key, value in sample.items() if value is not None}


def _conversation(row: Row, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = row["response_ids"][:MAX_RESPONSE_TOKENS]
    sample: dict[str, Any] = {
        "prompt": row["prompt"],
        "response": row["response"],
        "advantage": _rounded(row["advantage_mean"]),
        "kl": _rounded(row["kl"]),
        "finish": row["finish_reason"],
        "num_tokens": len(row["response_ids"]),
    }
    if tokenizer is not None:
        from tokenizers.decoders import DecodeStream

        # If a character spans several tokens, the last of them gets its text.
        stream = DecodeStream(skip_special_tokens=False)
        sample["tokens"] = [stream.step(tokenizer, int(token_id)) or "" for token_id in ids]
    if row["advantages"] is not None:
        sample["advantages"] = [_rounded(value) for value in row["advantages"][: len(ids)]]
    mask = row["response_mask"] or [True] * len(row["response_ids"])
    if row["ref_log_probs"] is not None:
        tokens = zip(row["log_probs"], row["ref_log_probs"], mask, strict=True)
        sample["changes"] = [_rounded(a - b) if own else 0.0 for a, b, own in tokens][: len(ids)]
    if not all(mask):
        sample["others"] = [index for index in range(len(ids)) if not mask[index]]
    rewards = row["turn_rewards"] or []
    earned = {t: _rounded(reward) for t, reward in enumerate(rewards[: len(ids)]) if reward}
    sample["rewards"] = earned or None
    uses = {end - 1: words for end, words in _tool_uses(row).items() if end <= len(ids)}
    sample["tools"] = uses or None
    return {key: value for key, value in sample.items() if value is not None}


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, or the text of the environment between two turns."""

    by_policy: bool
    text: str
    reward: float = 0.0
    """Reward of a turn of the policy, summed over its tokens. It is 0 for the environment."""
    tools: Sequence[str] = ()
    """Descriptions of the tool calls after the turn."""


def turns_of(row: Row, tokenizer: Tokenizer | None) -> list[Turn]:
    """Split a response into turns. Without an episode or a tokenizer, it is a single turn."""
    rewards, uses = row["turn_rewards"] or [], _tool_uses(row)
    if tokenizer is None or not row["turn_index"]:
        return [Turn(True, row["response"], sum(rewards), [t for ts in uses.values() for t in ts])]
    turns = []
    for by_policy, first, end in _stretches(row):
        text = tokenizer.decode(list(row["response_ids"][first:end]), skip_special_tokens=False)
        turns.append(Turn(by_policy, text, sum(rewards[first:end]), uses.get(end, ())))
    return turns


def _stretches(row: Row) -> list[tuple[bool, int, int]]:
    """Return a tuple (is by policy, begin, end) for each part of a response.

    A part is a turn of the policy, or what the environment wrote between two turns. Begin and end
    (exclusive) are token indices.
    """
    stretches, first = [], 0
    for turn, run in groupby(row["turn_index"] or [0] * len(row["response_ids"])):
        end = first + len(list(run))
        stretches.append((turn >= 0, first, end))
        first = end
    return stretches


def _tool_uses(row: Row) -> dict[int, list[str]]:
    """Return descriptions of tool calls, by the token index at which the turn before them ends.

    If an agent has several conversations, it is unknown in which of them a call was made. All calls
    are then placed at the end of the first conversation.
    """
    episode = row["episode"] or {}
    ends = [end for by_policy, _, end in _stretches(row) if by_policy]
    uses_by_end: dict[int, list[str]] = {}
    if not ends or row["row_index"]:
        return uses_by_end
    for use in episode.get("tool_uses") or ():
        is_told = len(ends) == episode["num_turns"]
        end = ends[max(use["turn"], 1) - 1] if is_told else ends[-1]
        failed = "" if use["error"] is None else f" failed: {use['error']}"
        uses_by_end.setdefault(end, []).append(
            f"{use['name'] or 'a call'}{failed} ({use['seconds']:.3g} s)"
        )
    return uses_by_end


def tokenizer_of(files: RunFiles, config: Mapping[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a run's saved policy or, without one, of its initial policy."""
    from tokenizers import Tokenizer

    content = files.read("policy/tokenizer.json")
    if content is None:
        path = Path(str((config.get("model") or {}).get("policy", ""))) / "tokenizer.json"
        content = path.read_bytes() if path.is_file() else None
    return None if content is None else Tokenizer.from_buffer(content)


def evenly(values: Sequence[Value], count: int) -> list[Value]:
    """Return at most `count` evenly spaced values, including the first and the last."""
    if len(values) <= count:
        return list(values)
    if count == 1:
        return [values[0]]
    last = len(values) - 1
    return [values[round(position * last / (count - 1))] for position in range(count)]


def _rounded(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.3g}")
