"""Mixing of several sources: their shares, and a note if a source has too few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raypo.config import ConfigError, DataSection, SourceEntry, source_name
from raypo.data.stream import Mix


def repetition_note(
    num_rows: int, rows_per_step: int, *, key: str = "rollout.prompts_per_step"
) -> str | None:
    """Return a note for the user if rows must repeat within a step, else None.

    Args:
        num_rows: Number of rows to draw from.
        rows_per_step: Number of rows that a step draws.
        key: The config key that sets `rows_per_step`.
    """
    if num_rows >= rows_per_step:
        return None
    what = "prompts" if key == "rollout.prompts_per_step" else "examples"
    return (
        f"a step takes {rows_per_step} {what} ({key}), but data.prompts has only {num_rows}, so "
        f"{what} repeat within a step; give more, or set {key} to at most {num_rows}"
    )


def mix_of(section: DataSection, sizes: Sequence[int], block: int) -> Mix | None:
    """Return the mix of the sources of `data.prompts`, or None if a source has no weight.

    None means that all sources are drawn from as one.

    Args:
        section: The sources and their weights.
        sizes: Number of usable rows of each source.
        block: Number of rows that a step draws.

    Raises:
        ConfigError: a source with a weight has no usable rows.
    """
    weights: list[float] = []
    for source, size in zip(section.prompts, sizes, strict=True):
        weight = source.weight if isinstance(source, SourceEntry) else None
        if weight is None:
            return None
        if not size:
            raise ConfigError(
                f"data.prompts ({source}): none of its rows can be used, but it has the weight "
                f"{weight:g}. Raise data.max_prompt_tokens, or remove it."
            )
        weights.append(weight)
    return Mix(tuple(sizes), tuple(weights), block)


def few_rows_notes(
    section: DataSection,
    sizes: Sequence[int],
    rows_per_step: int,
    *,
    key: str = "rollout.prompts_per_step",
) -> list[str]:
    """Return notes for the user about sources whose rows must repeat within a step.

    Args:
        section: The sources and their weights.
        sizes: Number of usable rows of each source.
        rows_per_step: Number of rows that a step draws.
        key: The config key that sets `rows_per_step`.
    """
    mix = mix_of(section, sizes, rows_per_step)
    if mix is None:
        note = repetition_note(sum(sizes), rows_per_step, key=key)
        return [note] if note else []
    notes = []
    for source, size, weight in zip(section.prompts, mix.sizes, mix.weights, strict=True):
        share = math.ceil(round(rows_per_step * weight / sum(mix.weights), 6))
        if size < share:
            notes.append(
                f"{source_name(source)} has {size} rows, but a step takes {share} of them (its "
                f"weight is {weight:g}, {key} {rows_per_step}), so they repeat within a step; "
                "give more, or a lower weight"
            )
    return notes
