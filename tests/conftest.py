"""What all tests share: markers from the folder, no hub, two threads, warnings as errors."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve the other processes

pytest.register_assert_rewrite("tests.engine_contract")

FOLDERS = {
    "unit": "unit",
    "integration": "integration",
    "gpu": "gpu",
    "slow": "slow",
    "benchmarks": "benchmark",
}
"""Folder below tests/ -> marker of the tests in it."""
TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Unit tests first: they answer first, and expect that no other test has started Ray.
    items.sort(key=lambda item: TESTS / "unit" not in item.path.parents)
    for item in items:
        if TESTS not in item.path.parents:
            continue
        marker = FOLDERS.get(item.path.relative_to(TESTS).parts[0])
        if marker:
            item.add_marker(marker)
        if marker == "unit":
            item.add_marker(pytest.mark.filterwarnings("error"), append=False)


def pytest_collection_finish() -> None:
    """Keep the millions of objects that imports have made out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def two_torch_threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
