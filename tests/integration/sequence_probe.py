"""One of several gloo workers that share the tokens of packed rows, without DeepSpeed.

python -m tests.integration.sequence_probe OUT, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
in the environment; rank 0 writes log-probs, entropies, values and gradients, summed over workers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from raypo.models import chunk_sizes
from raypo.models.packed_attention import reads_packed, use_packed_attention
from raypo.models.packing import pack
from raypo.models.sequence_parallel import SequenceGroup, sliced
from raypo.models.token_log_probs import has_plain_head, packed_log_probs

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 12,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "attn_implementation": "sdpa",
}
HEADS = {"4 of 4": (4, 4), "4 of 2": (4, 2), "8 of 1": (8, 1), "6 of 3": (6, 3), "5 of 1": (5, 1)}
"""Query heads and heads of keys and values: shared evenly, repeated, or padded."""


def models() -> dict[str, Any]:
    made: dict[str, Any] = {}
    sizes: dict[str, Any]
    for name, (heads, key_heads) in HEADS.items():
        sizes = SIZES | {"num_attention_heads": heads, "num_key_value_heads": key_heads}
        sizes["hidden_size"] = 12 * heads
        made[name] = LlamaConfig(**sizes)
    sizes = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}
    made["window"] = MistralConfig(**sizes, sliding_window=5)
    sizes["attn_implementation"] = "eager"  # SDPA has no cap
    made["capped"] = Gemma2Config(
        **sizes, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    )
    return made


def rows(kind: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts, of which some are shared, and responses; of lengths that nothing divides."""
    generator = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return generator.integers(4, 60, length).astype(np.int32)

    if kind == "tiny":  # fewer tokens than workers
        return [ids(1)], [ids(1)]
    prompts = [ids(7)] * 3 + [ids(1)] + [ids(130 if kind == "long" else 12)] * 2
    return prompts, [ids(length) for length in (1, 9, 4, 13, 6, 2)]


def passes(model: Any, group: SequenceGroup | None, kind: str) -> dict[str, Tensor]:
    """Log-probs and entropies of a pass, and the gradient of a function of them."""
    packed = sliced(pack(*rows(kind)), group)
    own, entropies = packed_log_probs(model, packed, temperature=0.7, with_entropy=True)
    assert entropies is not None
    log_probs, entropies = packed.unpacked(own), packed.unpacked(entropies)
    weights = torch.linspace(-1.0, 2.0, log_probs.numel()).view_as(log_probs)
    ((weights * log_probs).sum() + (log_probs * entropies).mean()).backward()
    return {"log_probs": log_probs.detach(), "entropies": entropies.detach()}


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients, summed over the workers; they are then reset."""
    summed = {}
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if dist.is_initialized():
            dist.all_reduce(grad)
        summed[f"gradient of {name}"] = grad
        parameter.grad = None
    return summed


def outcomes(group: SequenceGroup | None) -> dict[str, dict[str, Tensor]]:
    told = {}
    for name, config in models().items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        use_packed_attention(model)
        assert reads_packed(model), name
        assert has_plain_head(model) is (name != "capped")
        for kind in ("short", "long", "tiny"):
            told[f"{name}, {kind}"] = passes(model, group, kind) | gradients(model)
    checkpointed = AutoModelForCausalLM.from_config(models()["4 of 2"])
    use_packed_attention(checkpointed)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    told["checkpointed"] = passes(checkpointed, group, "short") | gradients(checkpointed)
    return told


def with_group(ranks: Sequence[range]) -> dict[str, dict[str, Tensor]]:
    rank = dist.get_rank()
    return outcomes(SequenceGroup.of(ranks, rank, len(ranks[0])))


def main() -> None:
    torch.set_num_threads(1)
    chunk_sizes.CHUNK_ELEMENTS = {"cpu": 400}
    dist.init_process_group("gloo")
    told = with_group([range(dist.get_world_size())])
    if dist.get_rank() == 0:
        torch.save(told, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
