"""Files of prompts, and what is said of wrong ones."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypo.config import ConfigError, DataSection

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


def save_to_disk(folder, rows, *, files=1, batch=1000):
    """A folder as the `save_to_disk` of datasets writes it: Arrow streams, and what they are."""
    folder.mkdir(parents=True)
    size = -(-len(rows) // files)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        table = pa.Table.from_pylist(rows[number * size : (number + 1) * size])
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=batch)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return str(folder)
