"""Peak memory of a forward and backward pass over one row, by its length; on CPU.

python -m tests.benchmarks.row_length [LENGTH ...]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig

from raypo.models import packed_attention
from raypo.models.activation_memory import checkpoint_layers, tile_mlps
from raypo.models.packed_attention import use_packed_attention
from raypo.models.packing import pack
from raypo.models.token_log_probs import has_plain_head, packed_log_probs
from tests.benchmarks.memory_probe import forget_peak, high_water_mark

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
LENGTHS = (2048, 4096, 8192, 16384)
TILE = 1024
WINDOW = 1024


def added(
    length: int, config: PreTrainedConfig, change: Callable[[torch.nn.Module], object]
) -> int:
    """Return the bytes that a pass adds at its peak, in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader) as told:
            size = int(told.read() or -1)
        os.waitpid(child, 0)
        return size
    model = AutoModelForCausalLM.from_config(config).train()
    use_packed_attention(model)
    has_plain_head(model)
    change(model)
    ids = np.arange(length) % 4000 + 4
    forget_peak()
    before = psutil.Process().memory_info().rss
    log_probs, _ = packed_log_probs(model, pack([ids[:8]], [ids[8:]]), temperature=1.0)
    log_probs.sum().backward()
    os.write(writer, str(high_water_mark(os.getpid()) - before).encode())
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    lengths = [int(each) for each in sys.argv[1:]] or LENGTHS
    config, windows = LlamaConfig(**SIZES), MistralConfig(**SIZES, sliding_window=WINDOW)

    def whole_masks(model: torch.nn.Module) -> None:
        packed_attention.QUERIES = 1 << 30
        checkpoint_layers(model)

    def tiled(model: torch.nn.Module) -> None:
        checkpoint_layers(model)
        tile_mlps(model, TILE)

    ways = {
        "all activations": (config, lambda model: None),
        "layer inputs": (config, checkpoint_layers),
        f"and MLPs in tiles of {TILE}": (config, tiled),
        f"window of {WINDOW}, layer inputs": (windows, checkpoint_layers),
        "the same with masks of the whole length": (windows, whole_masks),
    }
    print("| bytes a token | " + " | ".join(f"{length:,} tokens" for length in lengths) + " |")
    print("|" + "---|" * (1 + len(lengths)))
    for name, way in ways.items():
        sizes = [added(length, *way) / length for length in lengths]
        print(f"| {name} | " + " | ".join(f"{size:,.0f}" for size in sizes) + " |", flush=True)


if __name__ == "__main__":
    main()
