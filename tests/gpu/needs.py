"""Tests that need GPUs skip themselves where there are not enough, and say so."""

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPUs, {found} found")
