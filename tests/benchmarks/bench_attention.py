"""Candidates for the attention of packed rows on a GPU: seconds of a forward and a backward pass.

    python -m tests.benchmarks.bench_attention

It prints a line of JSON per candidate: flex attention as raypo runs it, padded to whole blocks or
not, with other blocks and kernel options, and flash attention over segments whose results are
merged by their log-sum-exp (`SegmentFlash`). Every candidate is first compared with the first.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypo.models import packed_attention
from raypo.models.packed_attention import KERNEL_OPTIONS, flex
from raypo.models.packing import Layout, Packed, in_whole_blocks, pack

PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 3, 8, 256, 512
HEADS, KV_HEADS, SIZES = 14, 2, (64, 128)
REPEATS = 20

Flash = Callable[..., tuple[Tensor, Tensor]]
"""(q [n, H, D], k, v [m, K, D], ends of both, causal, scale) -> output, log-sum-exp [H, n]."""
FlashBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""The same arguments after (gradient, output, lse) -> gradients of q, k and v."""


def cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    longest = (int(of_q.diff().max()), int(of_k.diff().max()))
    on_device = (of_q.to(q.device), of_k.to(q.device))
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *on_device, *longest, 0.0, causal, False, scale=scale
    )
    return out, lse


def cuda_flash_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    of_q: Tensor, of_k: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    longest = (int(of_q.diff().max()), int(of_k.diff().max()))
    on_device = (of_q.to(q.device), of_k.to(q.device))
    unused = torch.empty(0, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *on_device, *longest, 0.0, causal, unused, unused, scale=scale
    )


class SegmentFlash(torch.autograd.Function):
    """Attention [N, H, D] of packed rows by two calls of flash attention over varying lengths.

    The first lets every prompt and every response attend to itself; these segments follow each
    other in the packed row. The second lets the responses of a group attend to its prompt. Their
    results are merged by their log-sum-exp, with which the backward passes are exact
    (`raypo.models.shared_prompts` has the same for CPUs).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, K, D]
        v: Tensor,  # [N, K, D]
        layout: Layout,
        scale: float,
        flash: Flash,
        backward: FlashBackward,
    ) -> Tensor:
        own, said, prompts, (of_said, of_prompts) = segments(layout)
        out, lse = flash(q, k, v, own, own, True, scale)
        other, its_lse = flash(q[said], k[prompts], v[prompts], of_said, of_prompts, False, scale)
        both = torch.logaddexp(lse[:, said], its_lse)
        shares = ((each - both).exp().t()[..., None] for each in (lse[:, said], its_lse))
        merged = sum(s * o.float() for s, o in zip(shares, (out[said], other), strict=True))
        out[said], lse[:, said] = merged.to(out.dtype), both  # type: ignore[union-attr]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.more = layout, scale, backward
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        layout, scale, backward = ctx.more
        grad = grads[0].contiguous()
        own, said, prompts, (of_said, of_prompts) = segments(layout)
        made = backward(grad, out, lse, q, k, v, own, own, True, scale)
        more = backward(
            grad[said], out[said], lse[:, said].contiguous(), q[said], k[prompts], v[prompts],
            of_said, of_prompts, False, scale,
        )  # fmt: skip
        for whole, where, part in zip(made, (said, prompts, prompts), more, strict=True):
            whole[where] += part
        return *made, None, None, None, None


def segments(layout: Layout) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return segment ends, indices of response and prompt tokens, and their ends by group."""
    made = layout.__dict__.get("_segments_of_flash")
    if made is None:
        groups = [group for group in layout.groups if group.responses]
        lengths = [n for group in layout.groups for n in (group.prompt, *group.responses)]
        said = [torch.arange(g.responses_slice.start, g.responses_slice.stop) for g in groups]
        prompts = [torch.arange(g.prompt_slice.start, g.prompt_slice.stop) for g in groups]
        made = (
            ends(lengths),
            torch.cat(said).to(layout.device),
            torch.cat(prompts).to(layout.device),
            (ends([len(each) for each in said]), ends([len(each) for each in prompts])),
        )
        layout.__dict__["_segments_of_flash"] = made
    return made


def ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def batch(device: str) -> Packed:
    """Prompts with responses of the greatest length, as the run of bench_gpu has them."""
    prompts = [np.arange(1, PROMPT_TOKENS + 1) + number for number in range(PROMPTS)]
    responses = [np.arange(1, RESPONSE_TOKENS + 1)] * (PROMPTS * SAMPLES)
    return pack([each for each in prompts for _ in range(SAMPLES)], responses, device=device)


def candidates(size: int) -> Iterator[tuple[str, bool, Callable[..., Tensor]]]:
    """Yield a name, whether it reads whole blocks, and a function of (q, k, v, layout)."""
    options: dict[str, dict[str, Any]] = {
        "as it is": {},
        "backward blocks of 64": {f"bwd_BLOCK_{axis}": 64 for axis in ("M1", "N1", "M2", "N2")},
        "4 warps": {"num_warps": 4},
        "2 stages": {"num_stages": 2},
        "8 warps": {"num_warps": 8},
    }  # fmt: skip
    attention = packed_attention._flex_attention()
    for name, more in options.items():
        attend = partial(attention, scale=size**-0.5, kernel_options=KERNEL_OPTIONS | more)

        def run(q: Tensor, k: Tensor, v: Tensor, layout: Layout, attend: Any = attend) -> Tensor:
            query, key, value = (each.transpose(0, 1)[None] for each in (q, k, v))
            out = flex(query, key, value, layout, attend, window=None, softcap=None)
            return out[0].transpose(0, 1)

        if name == "as it is":
            yield "flex", False, run
        yield f"flex, whole blocks, {name}", True, run

    def by_segments(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
        return SegmentFlash.apply(q, k, v, layout, size**-0.5, cuda_flash, cuda_flash_backward)

    yield "flash over segments", False, by_segments


def seconds(function: Callable[[], Any]) -> float:
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(REPEATS):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / REPEATS


def measured(size: int) -> Iterator[dict[str, Any]]:
    packed = batch("cuda")
    padded = in_whole_blocks(packed)
    torch.manual_seed(0)
    count = packed.input_ids.shape[1]
    tokens = [
        torch.randn(count, heads, size, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    first: Tensor | None = None
    for name, is_padded, attend in candidates(size):
        rows = padded if is_padded else packed
        line: dict[str, Any] = {"candidate": name, "head": size, "tokens": rows.input_ids.shape[1]}
        try:
            inputs = [each.new_zeros(line["tokens"], *each.shape[1:]) for each in tokens]
            for own, each in zip(inputs, tokens, strict=True):
                # States differ in their places alone: fill those of the tokens that both have.
                own[rows.states] = each[packed.states]
                own.requires_grad_()
            out = attend(*inputs, rows.layout)
            grad = torch.ones_like(out)
            told = out[rows.states].float()
            first = told.detach() if first is None else first
            line["gap"] = float((told - first).norm() / first.norm())
            line["forward"] = seconds(partial(attend, *inputs, rows.layout))
            both = seconds(lambda: torch.autograd.grad(attend(*inputs, rows.layout), inputs, grad))  # noqa: B023
            line["backward"] = both - line["forward"]
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        yield line


if __name__ == "__main__":
    assert torch.cuda.is_available(), "this benchmark needs a GPU"
    for head_size in SIZES:
        for result in measured(head_size):
            print(json.dumps(result), flush=True)
