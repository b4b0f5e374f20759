"""Tables as the bytes of parquet files; small ones, read on the calling thread."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def to_parquet(table: pa.Table) -> bytes:
    """The table as the content of a parquet file."""
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def from_parquet(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The table that a parquet file holds.

    Arrow's own threads stay out of it: a process that ends while they live may be aborted
    (https://github.com/apache/arrow/issues/34314), after all its work.

    Args:
        columns: Those that are wanted; None: all of them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = None if columns is None else list(columns)
    return pq.ParquetFile(pa.BufferReader(content)).read(columns=names, use_threads=False)
