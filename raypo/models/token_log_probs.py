"""What a causal language model says of given responses, token by token."""

from __future__ import annotations

# B responses, P prompt tokens (padded left), T response tokens (padded right), V vocabulary,
# H hidden, N = B * T. Log-probs are float32, except that float64 logits stay float64.
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 besides the model's own at any time (64 MB)."""


def response_log_probs(
    model: Any,  # a Hugging Face causal language model
    prompt_ids: Tensor,  # [B, P] int64
    prompt_mask: Tensor,  # [B, P] bool, False on padding
    response_ids: Tensor,  # [B, T] int64
    attention_mask: Tensor,  # [B, T] bool, False on padding
    *,
    temperature: float,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the responses' tokens under softmax(logits / temperature), and the entropy.

    Besides the model's own logits nothing of their size is held in the forward pass, and their
    gradient alone in the backward pass. `T` may be zero-padded at will: padding changes nothing.

    Args:
        temperature: Positive; the one that the responses were sampled at.
        with_entropy: Compute the entropy of the tempered distribution too.
        entropy_grad: Let gradients flow through the entropy.

    Returns:
        log_probs: [B, T], nats; position t belongs to response token t; masked positions hold
            the log-prob of whatever id stands there.
        entropy: [B, T], nats, of the distribution that token t was drawn from, or None.
    """
    if temperature <= 0.0:
        raise ValueError(f"temperature ({temperature}): log-probs need a positive one.")
    inputs = _inputs(prompt_ids, prompt_mask, response_ids, attention_mask)
    logits = model(**inputs, logits_to_keep=response_ids.shape[1]).logits  # [B, T, V]
    log_probs, entropy = token_log_probs(
        logits, response_ids, temperature=temperature, with_entropy=with_entropy
    )
    if entropy is not None and not entropy_grad:
        entropy = entropy.detach()
    return log_probs, entropy


def response_hidden(
    backbone: Any,  # a Hugging Face model without a head
    prompt_ids: Tensor,  # [B, P] int64
    prompt_mask: Tensor,  # [B, P] bool, False on padding
    response_ids: Tensor,  # [B, T] int64
    attention_mask: Tensor,  # [B, T] bool, False on padding
) -> Tensor:
    """Hidden states [B, T, H] that precede each response token: the states a critic values."""
    inputs = _inputs(prompt_ids, prompt_mask, response_ids, attention_mask)
    hidden = backbone(**inputs).last_hidden_state  # [B, P + T - 1, H]
    return hidden[:, prompt_ids.shape[1] - 1 :]


def token_log_probs(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...] int64
    *,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) at the given tokens, and the entropy, both differentiable.

    Returns:
        log_probs: [...] float32.
        entropy: [...] float32, or None.
    """
    shape = token_ids.shape
    log_probs, entropy = _TokenLogProbs.apply(  # type: ignore[misc]
        logits.reshape(-1, logits.shape[-1]), token_ids.reshape(-1), temperature, with_entropy
    )
    return log_probs.view(shape), entropy.view(shape) if with_entropy else None


def _inputs(
    prompt_ids: Tensor, prompt_mask: Tensor, response_ids: Tensor, attention_mask: Tensor
) -> dict[str, Any]:
    """Arguments of a forward pass over prompt and response; the last token predicts nothing."""
    mask = torch.cat([prompt_mask, attention_mask], dim=1)[:, :-1].long()  # [B, P + T - 1]
    return {
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1)[:, :-1],
        "attention_mask": mask,
        "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        "use_cache": False,
    }


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs and entropy that keep the logits and one number a row for the backward pass.

    With z = logits / temperature, p = softmax(z) and H the entropy:
    d log p[a] / dz = onehot(a) - p, and dH / dz = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_norm = torch.empty(len(logits), dtype=dtype, device=logits.device)  # [N]
        entropy = torch.zeros_like(log_norm)  # [N]
        for rows in _chunks(logits):
            z = logits[rows].to(dtype, copy=True).div_(temperature)
            log_norm[rows] = z.logsumexp(-1)
            if with_entropy:
                log_p = _finite(z.sub_(log_norm[rows, None]))
                entropy[rows] = -(log_p.exp() * log_p).sum(-1)
        chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1).to(dtype) / temperature
        ctx.save_for_backward(logits, token_ids, log_norm, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return chosen - log_norm, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, token_ids, log_norm, entropy = ctx.saved_tensors
        grad_log_probs, grad_entropy = grads
        grad = torch.empty_like(logits)  # [N, V]
        for rows in _chunks(logits):
            z = logits[rows].to(log_norm.dtype, copy=True).div_(ctx.temperature)
            log_p = _finite(z.sub_(log_norm[rows, None]))
            p = log_p.exp()
            weight = grad_log_probs[rows, None].expand_as(p)
            if ctx.with_entropy:
                weight = weight + grad_entropy[rows, None] * log_p.add_(entropy[rows, None])
            chunk = p.mul_(weight).neg_()
            chunk.scatter_add_(-1, token_ids[rows, None], grad_log_probs[rows, None])
            grad[rows] = chunk.div_(ctx.temperature).to(grad.dtype)
        return grad, None, None, None


def _finite(log_p: Tensor) -> Tensor:
    """In place: a token that cannot be sampled (-inf) adds 0 to the entropy, not 0 * inf = NaN."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
