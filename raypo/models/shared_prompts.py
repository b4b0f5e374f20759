"""CPU attention over packed rows that computes the scores of shared prompts once.

A prompt attends to itself. A response attends to its prompt and to itself separately, and the two
results are combined by their softmax normalisers.

N packed tokens, H heads, D head size.
Paper: Juravsky et al. 2024, arXiv:2402.05099.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raypo.models.packing import Layout

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class SharedPrompts(torch.autograd.Function):
    """Causal attention [N, H, D] in which every response sees its prompt and itself."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, H, D]
        v: Tensor,  # [N, H, D]
        layout: Layout,
        scale: float,
    ) -> Tensor:
        """Compute attention to responses and to prompts, and combine both into one softmax."""
        mixed = torch.empty_like(q)
        norms = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        gather_index, _, tokens, scatter_index = layout.responses
        if len(tokens):
            own = _attend(*(x[gather_index] for x in (q, k, v)), scale=scale, causal=True)
            mixed[tokens], norms[tokens] = (tensor.flatten(0, 1)[scatter_index] for tensor in own)
        for group in layout.groups:
            prompt, said = group.prompt_slice, group.responses_slice
            seen = _attend(*(x[None, prompt] for x in (q, k, v)), scale=scale, causal=True)
            mixed[prompt], norms[prompt] = (tensor[0] for tensor in seen)
            if not group.responses:
                continue
            seen = _attend(
                q[None, said], k[None, prompt], v[None, prompt], scale=scale, causal=False
            )
            of_prompt, its_norms = (tensor[0] for tensor in seen)
            both = torch.logaddexp(its_norms, norms[said])
            its_share, own_share = (
                (tensor - both).exp()[..., None] for tensor in (its_norms, norms[said])
            )
            mixed[said] = its_share * of_prompt + own_share * mixed[said]
            norms[said] = both
        ctx.save_for_backward(q, k, v, mixed, norms)
        ctx.layout, ctx.scale = layout, scale
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of both parts separately.

        With the normaliser of the combined softmax, the probabilities in each part are exact.
        """
        q, k, v, mixed, norms = ctx.saved_tensors
        grad, scale = grads[0].contiguous(), ctx.scale
        made = tuple(torch.empty_like(tensor) for tensor in (q, k, v))
        gather_index, is_padding, tokens, scatter_index = ctx.layout.responses
        if len(tokens):
            inputs = [tensor[gather_index] for tensor in (grad, q, k, v, mixed, norms)]
            inputs[0][is_padding], inputs[-1][is_padding] = 0.0, torch.inf  # probability 0
            for whole, part in zip(
                made, _gradients(*inputs, scale=scale, causal=True), strict=True
            ):
                whole[tokens] = part.flatten(0, 1)[scatter_index]
        for group in ctx.layout.groups:
            prompt, said = group.prompt_slice, group.responses_slice
            inputs = [tensor[None, prompt] for tensor in (grad, q, k, v, mixed, norms)]
            for whole, part in zip(
                made, _gradients(*inputs, scale=scale, causal=True), strict=True
            ):
                whole[prompt] = part[0]
            if not group.responses:
                continue
            inputs = [tensor[None, said] for tensor in (grad, q, mixed, norms)]
            inputs[2:2] = [k[None, prompt], v[None, prompt]]
            parts = _gradients(*inputs, scale=scale, causal=False)
            for whole, where, part in zip(made, (said, prompt, prompt), parts, strict=True):
                whole[where] += part[0]
        return *made, None, None


def _attend(
    q: Tensor,  # [n, L, H, D]
    k: Tensor,  # [n, K, H, D]
    v: Tensor,  # [n, K, H, D]
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the attention output [n, L, H, D] and its log-sum-exp normalisers [n, L, H]."""
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    mixed, norms = _flash(*heads_first, 0.0, causal, scale=scale)
    return mixed.transpose(1, 2), norms.transpose(1, 2)


def _gradients(
    grad: Tensor,  # [n, L, H, D]
    q: Tensor,  # [n, L, H, D]
    k: Tensor,  # [n, K, H, D]
    v: Tensor,  # [n, K, H, D]
    mixed: Tensor,  # [n, L, H, D], attention output over all keys
    norms: Tensor,  # [n, L, H]
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v through the attention to these keys."""
    heads_first = (tensor.transpose(1, 2) for tensor in (grad, q, k, v, mixed, norms))
    made = _flash_backward(*heads_first, 0.0, causal, scale=scale)
    return tuple(tensor.transpose(1, 2) for tensor in made)
