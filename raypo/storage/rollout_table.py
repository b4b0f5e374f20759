"""Rollouts as a parquet table, one file a step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

REQUIRED = (
    "prompt",
    "response",
    "prompt_ids",
    "response_ids",
    "log_probs",
    "finish_reason",
    "weight_version",
    "prompt_index",
    "sample_index",
    "group_index",
)
"""Columns that every row has."""

OPTIONAL = (
    "label",
    "ref_log_probs",
    "score",
    "scores_by_source",
    "advantages",
    "advantage_mean",
    "kl",
)
"""Columns that are null where a row does not have them."""


def rollout_schema() -> pa.Schema:
    """The columns of `rollouts/step_00001.parquet`."""
    import pyarrow as pa

    return pa.schema(
        [
            ("prompt", pa.string()),
            ("response", pa.string()),
            ("label", pa.string()),  # JSON where the label is no text
            ("prompt_ids", pa.list_(pa.int32())),
            ("response_ids", pa.list_(pa.int32())),
            ("log_probs", pa.list_(pa.float32())),
            ("ref_log_probs", pa.list_(pa.float32())),  # null without a reference
            ("score", pa.float64()),  # null where scoring failed
            ("scores_by_source", pa.map_(pa.string(), pa.float64())),
            ("advantages", pa.list_(pa.float32())),  # by response token, as the update used them
            ("advantage_mean", pa.float64()),
            ("kl", pa.float64()),
            ("finish_reason", pa.string()),
            ("weight_version", pa.int64()),
            ("prompt_index", pa.int64()),
            ("sample_index", pa.int64()),
            ("group_index", pa.int64()),
        ]
    )


def rollout_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of `rollout_schema`.

    Raises:
        ValueError: a row has a column that the schema does not have, or lacks one it needs.
    """
    import pyarrow as pa

    schema = rollout_schema()
    for number, row in enumerate(rows):
        unknown, missing = row.keys() - set(schema.names), set(REQUIRED) - row.keys()
        if unknown or missing:
            what = f"unknown columns {sorted(unknown)}, missing columns {sorted(missing)}"
            raise ValueError(f"rollout row {number} has {what}; the columns are {schema.names}.")
    columns = [
        pa.array([_CELLS.get(name, _as_it_is)(row.get(name)) for row in rows], type=kind)
        for name, kind in zip(schema.names, schema.types, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _as_it_is(value: Any) -> Any:
    return value


def _text(value: str) -> str:
    return value.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate has no UTF-8


def _label(value: Any) -> str | None:
    if value is None:
        return None
    return _text(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain)
    )


def _plain(value: Any) -> Any:
    """What json cannot write: numpy by its lists and numbers, the rest by its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _numbers_by_name(value: Mapping[str, Any] | None) -> list[tuple[str, float | None]] | None:
    return None if value is None else [(name, _number(number)) for name, number in value.items()]


_CELLS: dict[str, Callable[[Any], Any]] = {
    "prompt": _text,
    "response": _text,
    "label": _label,
    "score": _number,
    "scores_by_source": _numbers_by_name,
    "advantage_mean": _number,
    "kl": _number,
}
