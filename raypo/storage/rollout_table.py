"""Rollouts as a parquet table, one file per step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

PART = "reward/"
"""Prefix of the columns for named reward parts, like `reward/format`. Missing parts are null."""

MAX_CHARACTERS = 500
"""Maximum number of characters of a further column of the data that is stored with a rollout."""


def rollout_schema() -> pa.Schema:
    """Return the schema of `rollouts/step_00001.parquet`. Rows need all non-nullable columns."""
    import pyarrow as pa

    def needed(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    return pa.schema(
        [
            needed("prompt", pa.string()),
            needed("response", pa.string()),
            pa.field("label", pa.string()),  # JSON unless the label is text
            pa.field("data_source", pa.string()),
            pa.field("row", pa.map_(pa.string(), pa.string())),  # other columns of the data
            needed("prompt_ids", pa.list_(pa.int32())),
            needed("response_ids", pa.list_(pa.int32())),
            needed("log_probs", pa.list_(pa.float32())),
            pa.field("response_mask", pa.list_(pa.bool_())),  # null: all tokens are the policy's
            pa.field("turn_rewards", pa.list_(pa.float32())),  # null without an environment
            pa.field("turn_index", pa.list_(pa.int32())),  # -1 for an environment's tokens
            pa.field("episode", _episode(pa)),
            pa.field("ref_log_probs", pa.list_(pa.float32())),  # null without a reference
            pa.field("score", pa.float64()),  # null if scoring failed
            pa.field("scores_by_source", pa.map_(pa.string(), pa.float64())),
            pa.field("reward_texts", pa.map_(pa.string(), pa.string())),  # null if there are none
            pa.field("advantages", pa.list_(pa.float32())),  # per token, as used by the update
            pa.field("advantage_mean", pa.float64()),
            pa.field("kl", pa.float64()),
            needed("finish_reason", pa.string()),
            needed("weight_version", pa.int64()),  # of the first token
            pa.field("weight_versions", pa.list_(pa.int64())),  # per token
            needed("prompt_index", pa.int64()),
            needed("sample_index", pa.int64()),
            needed("group_index", pa.int64()),
            pa.field("row_index", pa.int64()),  # index of the conversation in its episode
        ]
    )


def _episode(pa: Any) -> pa.DataType:
    """Return the column type of `raypo.types.Episode`. Cells are null without an environment."""
    use = pa.struct(
        [
            ("name", pa.string()),
            ("seconds", pa.float64()),
            ("error", pa.string()),
            ("turn", pa.int64()),
        ]
    )
    return pa.struct(
        [
            ("score", pa.float64()),
            ("num_turns", pa.int64()),
            ("environment_s", pa.float64()),
            ("error", pa.string()),
            ("metrics", pa.map_(pa.string(), pa.float64())),
            ("tool_uses", pa.list_(use)),
        ]
    )


def rollout_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table of `rollout_schema`, plus a column for each named part of the rewards.

    Raises:
        ValueError: a row has an unknown column, or lacks a required one.
    """
    import pyarrow as pa

    parts = sorted({name for row in rows for name in row if name.startswith(PART)})
    schema = rollout_schema()
    for name in parts:
        schema = schema.append(pa.field(name, pa.float64()))
    needed = {field.name for field in schema if not field.nullable}
    for number, row in enumerate(rows):
        unknown, missing = row.keys() - set(schema.names), needed - row.keys()
        if unknown or missing:
            what = f"unknown columns {sorted(unknown)}, missing columns {sorted(missing)}"
            raise ValueError(f"rollout row {number} has {what}; the columns are {schema.names}.")
    return pa.Table.from_pylist([_cells(row) for row in rows], schema=schema)


def merged(tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate rollout tables, sorted by group, sample and conversation."""
    import pyarrow as pa

    table = pa.concat_tables(tables, promote_options="default")
    columns = rollout_schema().names
    parts = sorted(name for name in table.column_names if name.startswith(PART))
    order = [(name, "ascending") for name in ("group_index", "sample_index", "row_index")]
    return table.select([*columns, *parts]).sort_by(order)


def _cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's cells. Labels become text, and NaN becomes null."""
    cells = dict(row)
    label = row.get("label")
    if label is not None and not isinstance(label, str):
        cells["label"] = _text(label)
    shown = (row.get("prompt"), cells.get("label"))
    texts = {name: _text(value) for name, value in (row.get("row") or {}).items()}
    cells["row"] = {
        name: text[:MAX_CHARACTERS] for name, text in texts.items() if text not in shown
    } or None
    for name in ("prompt", "response", "label", "row", "episode", "reward_texts"):
        cells[name] = _with_utf_8(cells.get(name))
    for name in ("score", "advantage_mean", "kl"):
        cells[name] = _number(row.get(name))
    by_source = row.get("scores_by_source")
    if by_source is not None:
        cells["scores_by_source"] = {name: _number(value) for name, value in by_source.items()}
    return cells


def _text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=json_default)


def _with_utf_8(value: Any) -> Any:
    """Replace lone surrogates, which UTF-8 lacks, with question marks in all strings of a value."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_with_utf_8(key): _with_utf_8(inner) for key, inner in value.items()}
    return [_with_utf_8(inner) for inner in value] if isinstance(value, list | tuple) else value


def json_default(value: Any) -> Any:
    """Convert a value that json cannot write: NumPy to lists and numbers, other types to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
