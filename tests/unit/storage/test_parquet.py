"""Small parquet files: what is written is read, and no thread is left to be aborted at the end."""

import subprocess
import sys

READS = """
import os
import pyarrow as pa
from raypo.storage.parquet import from_parquet, to_parquet

content = to_parquet(pa.table({"a": list(range(5000)), "b": [[1.0]] * 5000}))
before = len(os.listdir("/proc/self/task"))
from_parquet(content).to_pylist()
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_reading_starts_no_thread():
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
