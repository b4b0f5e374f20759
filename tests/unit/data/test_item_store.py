"""Prompts and examples of more rows than memory holds are stored in a temporary file."""

import json
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raypo.config import ConfigError, PairsSection, PreferencesSection, ResponsesSection
from raypo.data import item_store
from raypo.data.examples import load_examples, load_pairs, load_verdicts
from raypo.data.item_store import ItemStore, Selection
from raypo.data.prompts import load_prompts
from tests.unit.data.prompt_files import section


@pytest.fixture(params=[1, 100, 1 << 20], ids=["on disk", "spilled", "in memory"])
def memory(request, monkeypatch):
    monkeypatch.setattr(item_store, "MEMORY_BYTES", request.param)


def test_a_store_is_a_list_that_grows(memory):
    items = [{"number": n, "text": "x" * (n % 7)} for n in range(200)]
    store = ItemStore(items[:150])
    assert store[3] == items[3]  # a read moves the file's position
    for item in items[150:]:
        store.append(item)
    assert list(store) == items
    assert len(store) == 200
    assert store[-1] == items[-1]
    assert list(store[1::2][10:]) == items[1::2][10:]
    assert list(Selection(store, [5, 0, 5])) == [items[5], items[0], items[5]]
    with pytest.raises(IndexError):
        store[200]


def test_threads_read_a_store_at_the_same_time(memory):
    store = ItemStore(range(500))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(store.__getitem__, [*range(500)] * 4)) == [*range(500)] * 4


def test_a_full_disk_is_told_with_its_remedy(monkeypatch, tmp_path):
    monkeypatch.setattr(item_store, "MEMORY_BYTES", 10)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as error:
        ItemStore(["a text that is longer than ten bytes"])
    assert str(error.value).startswith(f"TMPDIR ({tmp_path}/none): rows that do not fit into")
    assert str(error.value).endswith("Set TMPDIR to a folder with more room, on every node.")


def _section(kind: Any, path: str, **values: Any) -> Any:
    return kind(prompts=path, max_prompt_tokens=9999, max_response_tokens=9999, **values)


LOADERS = {
    "prompts": lambda path, tokenizer: (
        load_prompts(section(path, max_prompt_tokens=9999), tokenizer).prompts
    ),
    "examples": lambda path, tokenizer: (
        load_examples(_section(ResponsesSection, path, response_key="chosen"), tokenizer, [0]).items
    ),
    "pairs": lambda path, tokenizer: load_pairs(_section(PairsSection, path), tokenizer, [0]).items,
    "verdicts": lambda path, tokenizer: (
        load_verdicts(_section(PreferencesSection, path), tokenizer, [0]).items
    ),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_few_bytes_a_row_stay_in_memory(tmp_path, tokenizer, monkeypatch, kind):
    count, length = 2_000, 200
    rows = [
        {"prompt": "1" * length, "chosen": "2", "rejected": str(n)} for n in range(3, count + 3)
    ]
    rows[0]["prompt"] = "3"  # kto compares responses to two prompts
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    in_memory = list(LOADERS[kind](str(path), tokenizer))
    monkeypatch.setattr(item_store, "MEMORY_BYTES", 1)
    tracemalloc.start()
    items = LOADERS[kind](str(path), tokenizer)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(items) == len(in_memory) >= count - 1
    assert 8 * count <= kept < 400_000, "the tokens alone are 1.6 MB"
    assert repr(items[7]) == repr(in_memory[7])
