"""What a causal language model says of given responses, token by token."""

from __future__ import annotations

# B responses, P prompt tokens, T response tokens, M of them all, V vocabulary, H hidden,
# N logits' rows. Log-probs are float32, except that float64 logits stay float64.
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from raypo.models.packed_attention import hidden_states, own_logits
from raypo.models.packing import Packed, pack_padded
from raypo.plan.sizes import CHUNK_ELEMENTS, SCRATCH_ELEMENTS


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

    No padding is read, and a prompt that several rows have only once.

    Args:
        temperature: Positive; the one that the responses were sampled at.
        with_entropy: Compute the entropy of the tempered distribution too.
        entropy_grad: Let gradients flow through the entropy.

    Returns:
        log_probs: [B, T], nats; position t belongs to response token t, 0 on padding.
        entropy: [B, T], nats, of the distribution that token t was drawn from, 0 on padding; or
            None.
    """
    packed = pack_padded(prompt_ids, prompt_mask, response_ids, attention_mask)
    log_probs, entropy = packed_log_probs(
        model, packed, temperature=temperature, with_entropy=with_entropy
    )
    if entropy is not None and not entropy_grad:
        entropy = entropy.detach()
    return packed.unpacked(log_probs), None if entropy is None else packed.unpacked(entropy)


def packed_log_probs(
    model: Any,  # a Hugging Face causal language model
    packed: Packed,
    *,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `response_log_probs`, of packed rows: [M] each, both differentiable."""
    if temperature <= 0.0:
        raise ValueError(f"temperature ({temperature}): log-probs need a positive one.")

    def of_chunk(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(
            logits, token_ids, temperature=temperature, with_entropy=with_entropy
        )

    log_probs, entropy = over_logits(model, packed, of_chunk, packed.response_ids)
    assert log_probs is not None
    return log_probs, entropy


def over_logits(
    model: Any,  # a Hugging Face causal language model
    packed: Packed,
    of_chunk: Callable[..., tuple[Tensor | None, ...]],
    *known: Tensor,  # [M, ...] each
) -> tuple[Tensor | None, ...]:
    """What a function makes of the logits of packed rows, differentiable where it is.

    The head is applied to a chunk of tokens at a time, in the backward pass once more, so that
    logits of [tokens, vocabulary] never exist. A model that does more to its logits than its head
    (a cap, a scale) makes all of them by itself.

    Args:
        of_chunk: Gets the logits [n, V] of some rows and what is known of these, [n, ...] each;
            what it returns, [n, ...] each or None, is put together over all rows.
    """
    if not has_plain_head(model) or any(model.get_output_embeddings().children()):
        return of_chunk(own_logits(model, packed), *known)
    head = model.get_output_embeddings()
    elements = CHUNK_ELEMENTS[head.weight.device.type]
    rows = max(1, elements // model.config.get_text_config().vocab_size)

    def of_states(states: Tensor, *known: Tensor) -> tuple[Tensor | None, ...]:
        return of_chunk(type(head).forward(head, states), *known)

    def of_all(states: Tensor, *known: Tensor) -> tuple[Tensor | None, ...]:
        chunks = list(zip(*(each.split(rows) for each in (states, *known)), strict=True))
        if len(chunks) > 1 and torch.is_grad_enabled():
            made = [checkpoint(of_states, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            made = [of_states(*chunk) for chunk in chunks]
        return tuple(
            None if parts[0] is None else torch.cat(parts) for parts in zip(*made, strict=True)
        )

    states = hidden_states(model.base_model, packed)  # [M, H]
    head.forward = of_all  # one call of the head, whatever the chunks: ZeRO-3 gathers at each
    try:
        return head(states, *known)
    finally:
        del head.forward


def has_plain_head(model: Any) -> bool:
    """Whether a causal language model's logits are its head's outputs, and nothing else.

    Tried once, to the bit: some models cap or scale their logits.
    """
    if "raypo_has_plain_head" not in model.__dict__:
        model.raypo_has_plain_head = model.base_model is not model and _is_plain(model)
    return model.raypo_has_plain_head


@torch.no_grad()
def _is_plain(model: Any) -> bool:
    head = model.get_output_embeddings()
    ids = torch.arange(4, device=head.weight.device)[None]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.equal(head(states), model(input_ids=ids, use_cache=False).logits)


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


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs and entropy that keep the logits and one number a row for the backward pass.

    With z = logits / temperature, p = softmax(z) and H the entropy:
    d log p[a] / dz = onehot(a) - p, and dH / dz = -p * (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, token_ids, log_norm, entropy = ctx.saved_tensors
        of_log_probs, of_entropy = grads  # None: nothing depends on it
        if of_log_probs is None:
            of_log_probs = torch.zeros_like(log_norm)
        grad = torch.empty_like(logits)  # [N, V]
        for rows in _chunks(logits):
            z = logits[rows].to(log_norm.dtype, copy=True).div_(ctx.temperature)
            log_p = _finite(z.sub_(log_norm[rows, None]))
            p = log_p.exp()
            if of_entropy is None or not ctx.with_entropy:
                chunk = p.mul_(-of_log_probs[rows, None])
            else:
                weight = of_entropy[rows, None] * log_p.add_(entropy[rows, None])
                chunk = p.mul_(weight.add_(of_log_probs[rows, None])).neg_()
            chunk.scatter_add_(-1, token_ids[rows, None], of_log_probs[rows, None])
            grad[rows] = chunk.div_(ctx.temperature)
        return grad, None, None, None


def _finite(log_p: Tensor) -> Tensor:
    """In place: a token that cannot be sampled (-inf) adds 0 to the entropy, not 0 * inf = NaN."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def _chunks(logits: Tensor) -> list[slice]:
    rows = max(1, SCRATCH_ELEMENTS[logits.device.type] // logits.shape[-1])
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
