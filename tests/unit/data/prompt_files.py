"""Files of prompts, and what is said of wrong ones."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypo.config import ConfigError, DataSection
from raypo.data import prompts

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "10+10=", "answer": "20"}]
CHAT = [{"role": "user", "content": "hi"}]


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def section(*paths, **values):
    return DataSection(prompts=paths, **values)


def refused(call, *args, **kwargs):
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    return str(error.value)


def peek(path, prompt_key="prompt", label_key=None, *, key="data.prompts", **values):
    """What the check before the start says of a source."""
    return prompts.peek(
        section(path, prompt_key=prompt_key, label_key=label_key, **values), key=key
    )


def save_to_disk(folder, rows, *, files=1):
    """A folder of a data set, as the package itself writes it."""
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder, num_shards=files)
    return str(folder)
