"""A first pass of a model over made-up responses, which compiles its kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypo.models.packing import pack
from raypo.models.shares import has_shards
from raypo.models.token_log_probs import packed_log_probs

PROMPTS, SAMPLES, TOKENS = 2, 16, 32
"""Prompts, responses to each, and tokens of each of them."""


def made_up_sequences() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return prompts and responses, with token ids that every model knows."""
    ids = np.arange(TOKENS) % 8 + 1
    prompts = [np.roll(ids, shift) for shift in range(PROMPTS)]
    return [(prompt, np.roll(ids, shift)) for prompt in prompts for shift in range(SAMPLES)]


def warm_up(model: Any, *, temperature: float) -> None:
    """Compute log-probs and their gradients once, so that all kernels are compiled.

    Neither weights, their gradients nor random states change. Gradients flow back to the embedded
    tokens only, so hooks of the weights' gradients are not called. A model in ZeRO-3 shards is left
    alone, because its passes are collective.

    Args:
        model: A Hugging Face causal language model.
        temperature: Sampling temperature, a constant of some kernels.
    """
    if has_shards(model):
        return
    packed = pack(*map(list, zip(*made_up_sequences(), strict=True)), device=model.device)
    embedded: list[Tensor] = []

    def cut_off(_module: Any, _arguments: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    with torch.no_grad():
        packed_log_probs(model, packed, temperature=temperature)
    hook = model.get_input_embeddings().register_forward_hook(cut_off)
    try:
        log_probs, _ = packed_log_probs(model, packed, temperature=temperature, with_entropy=True)
        torch.autograd.grad(log_probs.sum(), embedded)
    finally:
        hook.remove()
