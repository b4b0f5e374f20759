"""Gradients of lookups on a GPU: the right sums each time.

Between 1025 and 4096 places torch's own backward pass of an embedding has a race, which loses or
repeats terms. For few distinct tokens its sorting kernel adds with atomics, as of torch 2.11
(pytorch/pytorch#170589): the order of a sum varies, and with it the last bits.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raypo.models.embedding import avoid_racy_counts
from raypo.models.packed_attention import _at
from tests.gpu.needs import needs_gpus

ROWS, WIDTH, TIMES = 50, 512, 50


@needs_gpus(1)
@pytest.mark.parametrize("kind", ["states", "embedding"])
@pytest.mark.parametrize("places", [30, 1500, 3072, 4000])
def test_the_gradient_of_lookups_is_the_plain_sum_each_time(kind: str, places: int):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (places,), generator=generator)
    weight = torch.randn(places, WIDTH, generator=generator)
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add_(0, ids, weight.double())
    table = nn.Embedding(ROWS, WIDTH, device="cuda")
    avoid_racy_counts(SimpleNamespace(get_input_embeddings=lambda: table))
    ids, weight = ids.cuda(), weight.cuda()
    gradients = []
    for _ in range(TIMES):
        found = table(ids) if kind == "embedding" else _at(table.weight, ids)
        gradients += torch.autograd.grad((found * weight).sum(), table.weight)
    for each in gradients:
        assert torch.allclose(each.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    if kind == "states":
        assert all(torch.equal(each, gradients[0]) for each in gradients[1:])
