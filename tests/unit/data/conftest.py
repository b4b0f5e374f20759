import pytest
from transformers import AutoTokenizer

from tests.tiny import tiny_tokenizer
from tests.unit.data.prompt_files import ROWS, write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a character."""
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(params=[".jsonl", ".json", ".csv", ".parquet"])
def file(request, tmp_path):
    return write(tmp_path / f"prompts{request.param}", ROWS)
