"""Log-probs and entropies of given response tokens under a causal language model."""

from __future__ import annotations

# B responses, P prompt tokens, T response tokens, M response tokens of all rows, V vocabulary,
# H hidden size, N rows of logits. Log-probs are float32, or float64 for float64 logits.
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from raypo.models.chunk_sizes import SCRATCH_ELEMENTS, chunk_rows
from raypo.models.compiled import compiled
from raypo.models.linear import product_for
from raypo.models.packed_attention import hidden_states, own_logits
from raypo.models.packing import Packed, pack_padded
from raypo.models.sequence_parallel import SequenceGroup, sliced
from raypo.types import Images

PLACEHOLDER_BIAS = -100.0
"""Bias with which engines keep a policy from sampling the placeholder of an image. It comes before
the temperature. The learner computes with it as well, so that log-probs are equal."""


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
    device: torch.device | None = None,
    experts: tuple[Tensor, Tensor] | None = None,  # [B, P, L, k], [B, T, L, k]
    group: SequenceGroup | None = None,
    images: Sequence[Images | None] | None = None,  # [B]
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of response tokens under softmax(logits / temperature), and the entropy.

    Padding is skipped, and a prompt that several rows share is computed once.

    Args:
        temperature: Sampling temperature of the responses, positive.
        with_entropy: Also compute the entropy of the tempered distribution.
        entropy_grad: Let gradients flow through the entropy.
        device: Device of the model. None means the device of the ids.
        experts: Experts of each token, to be used instead of the routers' own choice. None means
            the own choice.
        group: Workers that share the tokens; all of them get the results of the same rows. None
            means that this worker computes all tokens.
        images: Images of each row's prompt. None means that no prompt has images.

    Returns:
        log_probs: [B, T], nats; position t belongs to response token t, 0 on padding.
        entropy: [B, T], nats, of the distribution that token t was drawn from, 0 on padding. None
            without `with_entropy`.
    """
    packed = pack_padded(
        prompt_ids,
        prompt_mask,
        response_ids,
        attention_mask,
        device=device,
        experts=experts,
        images=images,
    )
    packed = sliced(packed, group)
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
    """Compute log-probs and entropy (or None) of packed rows: [M] each, both differentiable."""
    if temperature <= 0.0:
        raise ValueError(f"temperature ({temperature}): it must be positive.")
    ids = packed.response_ids
    if not _has_bare_head(model):
        logits = _unlikely_placeholder(own_logits(model, packed), model.get_output_embeddings())
        return token_log_probs(logits, ids, temperature=temperature, with_entropy=with_entropy)
    head = model.get_output_embeddings()

    def of_states(states: Tensor) -> tuple[Tensor, Tensor]:
        return head_log_probs(head, states, ids, temperature, with_entropy)

    log_probs, entropy = _in_place_of_head(model, packed, of_states)
    return log_probs, entropy if with_entropy else None


def head_log_probs(
    head: Any,  # a linear layer
    states: Tensor,  # [M, H]
    token_ids: Tensor,  # [M] int64
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Compute each token's log-prob and entropy, [M] each, from the hidden state before it.

    The entropies are 0 without `with_entropy`.
    """
    return _HeadLogProbs.apply(  # type: ignore[no-any-return]
        states, head.weight, head.bias, token_ids, head, temperature, with_entropy
    )


def over_logits(
    model: Any,  # a Hugging Face causal language model
    packed: Packed,
    of_chunk: Callable[..., tuple[Tensor, ...]],
    *inputs: Tensor,  # [M, ...] each
) -> tuple[Tensor, ...]:
    """Apply a differentiable function to the logits of packed rows, chunk by chunk.

    The head is applied to one chunk of tokens at a time, and again in the backward pass, so the
    full logits [M, V] are never materialised. The exception is a model that transforms its logits
    after the head, such as by a cap or a scale: it computes all logits at once.

    Args:
        of_chunk: Function of the logits [n, V] of some tokens, and of their rows of `inputs`,
            [n, ...] each. It returns tensors [n, ...].
        inputs: Further inputs of the function, with one row per token.

    Returns:
        The function's results for all tokens, [M, ...] each.
    """
    if not _has_bare_head(model):
        logits = own_logits(model, packed)
        return of_chunk(_unlikely_placeholder(logits, model.get_output_embeddings()), *inputs)
    head = model.get_output_embeddings()

    def of_states(states: Tensor) -> tuple[Tensor, ...]:
        return _OverLogits.apply(states, head.weight, head.bias, head, of_chunk, *inputs)  # type: ignore[no-any-return]

    return _in_place_of_head(model, packed, of_states)


def _in_place_of_head(
    model: Any, packed: Packed, of_states: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Call the head once on the hidden states [M, H], with `of_states` in place of its forward.

    ZeRO-3 gathers a module's weights for each call, so a function that works chunk by chunk needs
    only one gather.
    """
    states = hidden_states(model.base_model, packed)
    head = model.get_output_embeddings()
    head.forward = of_states
    try:
        return head(states)
    finally:
        del head.forward


def _has_bare_head(model: Any) -> bool:
    """Return True if the logits are the output of a linear head without an adapter."""
    return has_plain_head(model) and not any(model.get_output_embeddings().children())


def has_plain_head(model: Any) -> bool:
    """Return True if a causal language model's logits are exactly its head's output.

    Some models cap or scale their logits. So the head is once replaced by a function that returns
    large numbers, and the model must return them unchanged; the answer is cached. The head's own
    output would not do: caps and scales leave zeros as they are, and a head may start at zero.
    """
    if "raypo_has_plain_head" not in model.__dict__:
        model.raypo_has_plain_head = model.base_model is not model and _is_plain(model)
    return model.raypo_has_plain_head


@torch.no_grad()
def _is_plain(model: Any) -> bool:
    head = model.get_output_embeddings()
    ids = torch.arange(4, device=head.weight.device)[None]
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if states.dtype != head.weight.dtype:  # Mamba keeps its residuals in float32
        return False
    is_plain = False

    def large(input: Tensor) -> Tensor:
        nonlocal is_plain, logits
        is_plain = torch.equal(input, states)  # RemBERT projects its states before the head
        size = len(head.weight)  # ZeRO-3 has gathered it
        logits = torch.linspace(-100.0, 100.0, size, device=input.device).to(input.dtype)
        logits = logits.expand(*input.shape[:-1], size)
        return logits.clone()

    logits = states
    head.forward = large
    try:
        told = model(input_ids=ids, use_cache=False).logits
    finally:
        del head.forward
    return is_plain and torch.equal(logits, told)


def token_log_probs(
    logits: Tensor,  # [..., V]
    token_ids: Tensor,  # [...] int64
    *,
    temperature: float,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute log softmax(logits / temperature) at the given tokens, and the entropy.

    Both are differentiable.

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
    """Log-probs and entropy that save only the logits and two numbers per row for backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        log_probs, log_norm, entropy = _statistics(logits, token_ids, temperature, with_entropy)
        ctx.save_for_backward(logits, token_ids, log_norm, entropy)
        ctx.temperature = temperature
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, *saved = ctx.saved_tensors
        grad = torch.empty_like(logits)
        _gradient_of_logits(logits, *saved, *grads, temperature=ctx.temperature, out=grad)
        return grad, None, None, None


class _HeadLogProbs(torch.autograd.Function):
    """`_TokenLogProbs` for a head whose logits are computed chunk by chunk and not saved.

    The backward pass recomputes each chunk's logits. The gradient of the head's weight is
    accumulated in float32, whatever its dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [M, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        token_ids: Tensor,  # [M] int64
        head: Any,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows = chunk_rows(len(weight), weight.device.type)
        made = [
            _statistics(_logits(head, chunk, weight, bias), ids, temperature, with_entropy)
            for chunk, ids in zip(states.split(rows), token_ids.split(rows), strict=True)
        ]
        log_probs, log_norm, entropy = (torch.cat(parts) for parts in zip(*made, strict=True))
        ctx.save_for_backward(states, weight, bias, token_ids, log_norm, entropy)
        ctx.head, ctx.temperature = head, temperature
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, weight, bias, *saved = ctx.saved_tensors

        def gradient(logits: Tensor, rows: slice) -> Tensor:
            inputs = [None if tensor is None else tensor[rows] for tensor in (*saved, *grads)]
            _gradient_of_logits(logits, *inputs, temperature=ctx.temperature, out=logits)  # type: ignore[arg-type]
            return logits

        rows = chunk_rows(len(weight), weight.device.type)
        gradients = _head_gradients(ctx, states, weight, bias, gradient, rows)
        return *gradients, None, None, None, None


class _OverLogits(torch.autograd.Function):
    """Function of a head's logits, which are computed chunk by chunk as in `_HeadLogProbs`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,  # [M, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        head: Any,
        of_chunk: Callable[..., tuple[Tensor, ...]],
        *inputs: Tensor,  # [M, ...] each
    ) -> tuple[Tensor, ...]:
        # ZeRO-3 has gathered the weight.
        rows = chunk_rows(len(weight), weight.device.type, is_fused=False)
        made = [
            of_chunk(_logits(head, chunk, weight, bias), *some)
            for chunk, *some in zip(
                *(tensor.split(rows) for tensor in (states, *inputs)), strict=True
            )
        ]
        ctx.save_for_backward(states, weight, bias, *inputs)
        ctx.head, ctx.of_chunk = head, of_chunk
        return tuple(map(torch.cat, zip(*made, strict=True)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, *inputs = ctx.saved_tensors

        def gradient(logits: Tensor, rows: slice) -> Tensor:
            with torch.enable_grad():
                told = ctx.of_chunk(logits.requires_grad_(), *(tensor[rows] for tensor in inputs))
                return torch.autograd.grad(told, logits, [grad[rows] for grad in grads])[0]

        rows = chunk_rows(len(weight), weight.device.type, is_fused=False)
        gradients = _head_gradients(ctx, states, weight, bias, gradient, rows)
        return *gradients, None, None, *(None for _ in inputs)


def _head_gradients(
    ctx: Any,  # of a function whose first inputs are states, weight and bias
    states: Tensor,  # [M, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,  # [V]
    gradient: Callable[[Tensor, slice], Tensor],
    size: int,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of states, weight and bias, chunk by chunk.

    Args:
        gradient: Function `(logits [n, V], rows)` that returns the gradient of these logits. It may
            overwrite them.
        size: Number of rows in a chunk.
    """
    of_states, of_weight, of_bias = ctx.needs_input_grad[:3]
    grad_states = torch.empty_like(states) if of_states else None
    exact = torch.promote_types(weight.dtype, torch.float32)
    grad_weight = weight.new_zeros(weight.shape, dtype=exact) if of_weight else None
    grad_bias = weight.new_zeros(len(weight), dtype=exact) if of_bias else None
    for first in range(0, len(states), size):
        rows = slice(first, first + size)
        # A head in float32 has logits in another dtype than its weights.
        grad = gradient(_logits(ctx.head, states[rows], weight, bias), rows).to(weight.dtype)
        if grad_states is not None:
            grad_states[rows] = product_for(ctx.head)(grad, weight.t())
        if grad_weight is not None:
            _add_product(grad_weight, grad.t(), states[rows], ctx.head)
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=exact)
    cast = (None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
    return grad_states, *cast


def _add_product(total: Tensor, left: Tensor, right: Tensor, head: Any) -> None:
    """Add left [V, n] @ right [n, H] to `total` [V, H] in place; factors may be rounded."""
    if total.device.type != "cpu" and left.dtype in (torch.bfloat16, torch.float16):
        # One kernel, without a product in bfloat16 between. torch lacks it on CPUs.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += product_for(head)(left, right.t())


def _logits(head: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = product_for(head)(states, weight)
    return _unlikely_placeholder(logits if bias is None else logits.add_(bias), head)


def _unlikely_placeholder(logits: Tensor, head: Any) -> Tensor:
    """Add the bias of the engines to the logit of an image's placeholder, in place."""
    token = getattr(getattr(head, "base_layer", head), "placeholder_id", None)  # below an adapter
    if token is not None:
        logits[..., token] += PLACEHOLDER_BIAS
    return logits


def _statistics(
    logits: Tensor,  # [N, V]
    token_ids: Tensor,  # [N]
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's log-prob, log of its softmax's normaliser, and entropy: [N] each.

    The entropies are 0 without `with_entropy`.
    """
    of_rows = _compiled(_statistics_of_rows) if _is_compiled(logits) else _statistics_of_rows
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_norm = torch.empty(len(logits), dtype=dtype, device=logits.device)
    entropy = torch.zeros_like(log_norm)
    for rows in _chunks(logits):
        log_norm[rows], of_chunk = of_rows(logits[rows], temperature, with_entropy)
        if of_chunk is not None:
            entropy[rows] = of_chunk
    chosen = logits.gather(-1, token_ids[:, None]).squeeze(-1).to(dtype) / temperature
    return chosen - log_norm, log_norm, entropy


def _statistics_of_rows(
    logits: Tensor,  # [n, V]
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the log of the softmax's normaliser, and the entropy (or None), of each row: [n]."""
    z = _tempered(logits, temperature)
    log_norm = z.logsumexp(-1)
    if not with_entropy:
        return log_norm, None
    log_p = _finite(z.sub_(log_norm[:, None]))
    return log_norm, -(log_p.exp() * log_p).sum(-1)


def _gradient_of_logits(
    logits: Tensor,  # [N, V]
    token_ids: Tensor,  # [N]
    log_norm: Tensor,  # [N]
    entropy: Tensor,  # [N]
    of_log_probs: Tensor | None,  # [N]; None if no gradient flows through the log-probs
    of_entropy: Tensor | None,  # [N]
    *,
    temperature: float,
    out: Tensor,
) -> None:
    """Write the gradient of the logits into `out` [N, V], which may be the logits themselves."""
    of_rows = _compiled(_gradient_of_rows) if _is_compiled(logits) else _gradient_of_rows
    if of_log_probs is None:
        of_log_probs = torch.zeros_like(log_norm)
    for rows in _chunks(logits):
        piece = logits[rows]
        of_rows(
            piece,
            token_ids[rows],
            log_norm[rows],
            entropy[rows],
            of_log_probs[rows],
            None if of_entropy is None else of_entropy[rows],
            temperature,
            piece if out is logits else out[rows],  # the same tensor object if they share memory
        )


def _gradient_of_rows(
    logits: Tensor,  # [n, V]
    token_ids: Tensor,  # [n]
    log_norm: Tensor,  # [n]
    entropy: Tensor,  # [n]
    of_log_probs: Tensor,  # [n]
    of_entropy: Tensor | None,  # [n]
    temperature: float,
    out: Tensor,  # [n, V]
) -> None:
    """Write the gradient of some rows of logits into `out`.

    With z = logits / temperature, p = softmax(z) and H the entropy:
    d log p[a] / dz = onehot(a) - p, and dH / dz = -p * (log p + H).
    """
    log_p = _finite(_tempered(logits, temperature).sub_(log_norm[:, None]))
    if of_entropy is None:
        grad = log_p.exp_().mul_(-of_log_probs[:, None])
    else:
        p = log_p.exp()
        weight = of_entropy[:, None] * log_p.add_(entropy[:, None])
        grad = p.mul_(weight.add_(of_log_probs[:, None])).neg_()
    if torch.compiler.is_compiling():  # a scatter would split the fused kernel
        is_chosen = torch.arange(logits.shape[1], device=logits.device) == token_ids[:, None]
        grad = torch.where(is_chosen, grad + of_log_probs[:, None], grad)
    else:
        grad.scatter_add_(-1, token_ids[:, None], of_log_probs[:, None])
    out.copy_(grad if temperature == 1.0 else grad.div_(temperature))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature as a new tensor, in float32 unless they are float64."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    return z if temperature == 1.0 else z.div_(temperature)


def _finite(log_p: Tensor) -> Tensor:
    """Clamp -inf in place, so that an impossible token adds 0 to the entropy, not 0 * inf = NaN.

    The bound is far enough from the largest float that an entropy coefficient cannot make it inf.
    """
    return log_p.clamp_(min=-1e30)


def _is_compiled(logits: Tensor) -> bool:
    """Return True if the compiled kernels are used.

    On GPUs memory traffic dominates. In a forward and a backward pass together, eager operations
    move about 140 bytes per logit, and the fused kernels 10. On CPUs a chunk fits the caches.
    """
    return logits.is_cuda and len(logits) > 0


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any number of rows.

    If dynamo's limit of variants is exceeded, the function runs uncompiled.
    """
    made = compiled(function)

    def call(*args: Any) -> Any:
        # Otherwise the temperature would be a float64 argument of the kernel. Set this on every
        # call, because it is a setting per thread, and the backward pass has its own thread.
        torch._dynamo.config.specialize_float = True
        return made(*args)

    return call


def _chunks(logits: Tensor) -> list[slice]:
    """Split rows into slices.

    Eager functions copy a slice to float32, so their slices are small. Compiled functions make no
    copies.
    """
    vocabulary, device = logits.shape[-1], logits.device.type
    if _is_compiled(logits):
        rows = chunk_rows(vocabulary, device)
    else:
        rows = max(1, SCRATCH_ELEMENTS[device] // vocabulary)
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
