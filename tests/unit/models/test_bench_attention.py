"""Flash attention over segments, a candidate for GPUs, gives the numbers of separate rows."""

from typing import Any

import torch
from torch import Tensor

from raypo.models.packed_attention import attention_by_rows
from tests.benchmarks.bench_attention import SegmentFlash
from tests.unit.models.test_packing import long_rows

HEADS, SIZE = 3, 8
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def pieces(tensor: Tensor, ends: Tensor) -> list[Tensor]:
    """[n, H, D] as one [1, H, length, D] of each segment."""
    parts = tensor.split(ends.diff().tolist())
    return [part.transpose(0, 1)[None] for part in parts]


def flash(q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, causal: bool, scale: float):
    made = [
        _forward(*each, 0.0, causal, scale=scale)
        for each in zip(pieces(q, of_q), pieces(k, of_k), pieces(v, of_k), strict=True)
    ]
    out = torch.cat([out[0].transpose(0, 1) for out, _ in made])
    return out, torch.cat([lse[0] for _, lse in made], dim=1)


def backward(grad: Tensor, out: Tensor, lse: Tensor, *more: Any):
    q, k, v, of_q, of_k, causal, scale = more
    of_queries = (pieces(each, of_q) for each in (grad, q))
    others = (pieces(out, of_q), lse[None].split(of_q.diff().tolist(), dim=2))
    made = [
        _backward(g, own, keys, values, result, norm, 0.0, causal, scale=scale)
        for g, own, keys, values, result, norm in zip(
            *of_queries, pieces(k, of_k), pieces(v, of_k), *others, strict=True
        )
    ]
    return tuple(
        torch.cat([each[0].transpose(0, 1) for each in parts]) for parts in zip(*made, strict=True)
    )


def test_two_calls_merged_by_their_log_sum_exp_are_one_attention() -> None:
    packed = long_rows(3, 3)
    layout = packed.layout
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(packed.input_ids.shape[1], HEADS, SIZE, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    )
    query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
    module: Any = torch.nn.Identity()
    expected, _ = attention_by_rows(module, query, key, value, None, layout=layout, scaling=0.3)
    found = SegmentFlash.apply(q, k, v, layout, 0.3, flash, backward)
    torch.testing.assert_close(found, expected[0], rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(found)
    mine = torch.autograd.grad(found, (q, k, v), grad)
    theirs = torch.autograd.grad(expected[0], (q, k, v), grad)
    for each, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-6, atol=1e-6)
