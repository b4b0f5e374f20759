"""Flex attention compiled for this CPU: torch has its forward pass here, without windows."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from raypo.models import packed_attention
from raypo.models.packing import pack


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> Iterator[None]:
    limit = torch._dynamo.config.recompile_limit
    packed_attention._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@torch.no_grad()
def gap(seed: int, heads: int, kv_heads: int) -> float:
    """The largest difference from attention over separate rows; the seed decides all lengths."""
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(4, 60, int(generator.integers(20, 200))) for _ in range(4)]
    responses = [generator.integers(4, 60, int(generator.integers(1, 200))) for _ in range(12)]
    layout = pack([each for each in prompts for _ in range(3)], responses).layout
    tokens = len(layout.segments[0])
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, each, tokens, 16) for each in (heads, kv_heads, kv_heads))
    attend = partial(packed_attention._flex_attention(), scale=0.25)
    found = packed_attention.flex(q, k, v, layout, attend, window=None, softcap=None)
    rows, _ = packed_attention.packed_attention(nn.Module(), q, k, v, None, layout=layout)
    return float((found.transpose(1, 2) - rows).abs().max())


def test_all_lengths_are_one_kernel_and_say_what_separate_rows_say():
    for kinds, heads in enumerate([(4, 2), (4, 4)], start=1):
        assert max(gap(seed, *heads) for seed in range(10)) < 1e-5
        assert counters["stats"]["unique_graphs"] == kinds


def test_more_kinds_than_expected_are_no_reason_to_compute_every_score(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(packed_attention, "MAX_COMPILED", 1)
    gap(0, 4, 2)
    with pytest.raises(FailOnRecompileLimitHit):
        gap(0, 4, 4)
