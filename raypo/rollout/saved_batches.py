"""The file of a checkpoint with the batches that were sampled ahead of the update.

It holds arrays and JSON, and nothing that is executed when it is read: run folders may be writable
for other users of a cluster.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from raypo.data.images import without_images
from raypo.rollout.step_batch import StepBatch
from raypo.storage.retries import retried
from raypo.storage.rollout_table import json_default
from raypo.types import Episode, Prompt, Rollout, ToolUse

_ARRAYS = (
    *("prompt_ids", "response_ids", "log_probs", "response_mask"),
    *("turn_rewards", "turn_index", "ref_log_probs", "prompt_experts", "response_experts"),
)
_IN_THE_DATA = ("label", "row", "images")
"""Fields that may be large or anything. They are not saved, but read from the prompt's row again.
"""
_OTHERS = [
    field.name
    for field in fields(Rollout)
    if field.name not in (*_ARRAYS, *_IN_THE_DATA, "episode")
]


def write_batches(path: Path, batches: Mapping[int, StepBatch], state: Mapping[str, Any]) -> None:
    """Write batches by step, and further state of plain JSON values."""
    rollouts = [rollout for batch in batches.values() for rollout in batch.scored]
    index = {id(rollout): number for number, rollout in enumerate(rollouts)}
    saved = {
        "rollouts": [_plain(rollout) for rollout in rollouts],
        "batches": {
            step: {
                "scored": [index[id(rollout)] for rollout in batch.scored],
                "trained": [index[id(rollout)] for rollout in batch.trained],
                "missing_groups": batch.missing_groups,
                "metrics": batch.metrics,
            }
            for step, batch in batches.items()
        },
        "state": state,
    }
    text = json.dumps(saved, default=json_default).encode()
    arrays: dict[str, np.ndarray] = {"json": np.frombuffer(text, np.uint8)}
    for name in _ARRAYS:
        values = [getattr(rollout, name) for rollout in rollouts]
        arrays[f"{name}_lengths"] = np.array(
            [-1 if value is None else len(value) for value in values]
        )
        present = [value for value in values if value is not None]
        arrays[name] = np.concatenate(present) if present else np.empty(0)

    def write() -> None:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)

    retried(write, f"writing {path.name}")


def read_batches(
    path: Path, prompts: Sequence[Prompt]
) -> tuple[dict[int, StepBatch], dict[str, Any]]:
    """Return the batches by step and the state that `write_batches` wrote.

    Args:
        path: The file.
        prompts: All prompts of the run, in the order of their indices.
    """
    with np.load(path, allow_pickle=False) as arrays:
        saved = json.loads(arrays["json"].tobytes())
        columns = {name: _split(arrays[name], arrays[f"{name}_lengths"]) for name in _ARRAYS}
    prompt_of = lru_cache(maxsize=None)(partial(_prompt_of, prompts))
    rollouts = []
    for number, plain in enumerate(saved["rollouts"]):
        values = {name: column[number] for name, column in columns.items()}
        # A prompt is read once, so that its rollouts hold the same images.
        rollouts.append(_rollout(plain, values, prompt_of(plain["prompt_index"])))
    batches = {
        int(step): StepBatch(
            [rollouts[number] for number in batch["scored"]],
            [rollouts[number] for number in batch["trained"]],
            batch["missing_groups"],
            batch["metrics"],
        )
        for step, batch in saved["batches"].items()
    }
    return batches, saved["state"]


def _plain(rollout: Rollout) -> dict[str, Any]:
    plain = {name: getattr(rollout, name) for name in _OTHERS}
    return plain | {"episode": rollout.episode and asdict(rollout.episode)}


def _prompt_of(prompts: Sequence[Prompt], index: int) -> Prompt | None:
    """Return a prompt, or None if its row is gone because the user has accepted changed data."""
    bare = without_images(prompts)
    position = min(bisect_left(bare, index, key=lambda prompt: prompt.index), len(prompts) - 1)
    return prompts[position] if bare[position].index == index else None


def _rollout(plain: dict[str, Any], arrays: dict[str, Any], prompt: Prompt | None) -> Rollout:
    episode = plain.pop("episode")
    if episode is not None:
        uses = tuple(ToolUse(**use) for use in episode.pop("tool_uses"))
        episode = Episode(**episode, tool_uses=uses)
    later = tuple((first, version) for first, version in plain.pop("later_versions"))
    return Rollout(
        **plain,
        **arrays,
        label=prompt.label if prompt else None,
        row=prompt.row if prompt else {},
        images=prompt.images if prompt else None,
        episode=episode,
        later_versions=later,
    )


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray | None]:
    """Split the arrays that `write_batches` has concatenated; length -1 stands for None."""
    ends = np.cumsum(np.maximum(lengths, 0))
    begins = ends - np.maximum(lengths, 0)
    return [
        None if length < 0 else values[begin:end]
        for begin, end, length in zip(begins, ends, lengths, strict=True)
    ]
