"""Small parquet files: what is written is read, and no thread is left to be aborted at the end."""

import subprocess
import sys

import pyarrow as pa

from raypo.storage.parquet import from_parquet, to_parquet

READS = """
import os
import pyarrow as pa
from raypo.storage.parquet import from_parquet, to_parquet

content = to_parquet(pa.table({"a": list(range(5000)), "b": [[1.0]] * 5000}))
before = len(os.listdir("/proc/self/task"))
from_parquet(content).to_pylist()
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_what_is_written_is_read():
    table = pa.table({"a": [1, 2], "b": [["x"], None]}).replace_schema_metadata({"of": "run"})
    read = from_parquet(to_parquet(table))
    assert read.to_pylist() == table.to_pylist()
    assert read.schema.metadata[b"of"] == b"run"
    assert from_parquet(to_parquet(table), ["b"]).to_pylist() == [{"b": ["x"]}, {"b": None}]


def test_reading_starts_no_thread():
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
