import numpy as np
import pytest

from raypo.metrics.process_memory import peak_memory


def test_the_peak_stays_when_the_memory_is_given_back():
    held = np.ones(60_000_000, dtype=np.uint8)
    with_it = peak_memory()["memory"]
    assert with_it > held.nbytes / 1e9
    del held
    after = peak_memory()["memory"]
    assert after == pytest.approx(with_it, abs=0.01)  # the kernel counts pages in batches
