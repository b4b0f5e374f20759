"""What a driver pays before it starts anything: processor seconds, counted in `import torch`s.

That unit is measured in the same run, so that figures of different machines can be compared; they
are printed (`-s` shows them).
"""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest


def processor_seconds(code: str) -> float:
    """Of a fresh interpreter that runs `code`; the better of two."""
    times = []
    for _ in range(2):
        before = psutil.Process().cpu_times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = psutil.Process().cpu_times()
        times.append(
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )
    return min(times)


@pytest.fixture(scope="module")
def torch_s() -> float:
    return processor_seconds("import torch")


def test_what_a_driver_imports(torch_s: float):
    driver = processor_seconds("import raypo.trainer")
    with_models = processor_seconds("import raypo.trainer, raypo.recipes.ppo")
    print(f"\nimport raypo.trainer: {driver / torch_s:.1f} import torch")
    print(f"  with the loop and its models: {with_models / torch_s:.1f}")
    assert driver <= 0.8 * with_models
