"""Conversion of small tables to and from the bytes of parquet files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as the content of a parquet file."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def from_parquet(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table in a parquet file.

    Args:
        content: Content of the file.
        columns: Columns to read. None means all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = None if columns is None else list(columns)
    # Use no Arrow threads: a process that exits while these threads live may abort after all its
    # work is done (https://github.com/apache/arrow/issues/34314).
    return pq.ParquetFile(pa.BufferReader(content)).read(columns=names, use_threads=False)
