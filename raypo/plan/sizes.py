"""Sizes of buffers and caches that the run keeps to and `raypo plan` counts with."""

from __future__ import annotations

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits that are made at any time, by device. The head is read once for each chunk, and so is the
float32 sum of its gradient."""
SCRATCH_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Of those, how many are worked on in float32 at a time: on CPUs what their caches hold."""
SHARED_SCORES = 4096
"""On CPUs attention reads a prompt once where whole rows would repeat more scores than this, on the
average of the prompts: each costs some calls of its own."""
BUCKET_BYTES = 256 * 1024**2
"""Weights that are pushed together."""
LARGE_GPU_BYTES = 70 * 1024**3
"""From here on an engine samples more sequences at a time."""
CPU_BLOCK_TOKENS = 128
"""Of a block of an engine's KV cache on CPU."""
CPU_SEQUENCES = 32
"""Sequences of full length that the default KV cache on CPU holds, within the limits below."""
CPU_KV_BYTES = (1 << 29, 1 << 31)


def repeated_scores(prompt_tokens: int, responses: int) -> int:
    """Scores of a prompt's tokens among themselves that rows of prompt and response repeat."""
    return max(0, responses - 1) * prompt_tokens**2 // 2


def engine_sequences(gpu_bytes: int | None) -> int:
    """Most sequences that an engine samples at a time, as vLLM 0.32 chooses by itself.

    Each has a row of logits in float32, three times.

    Args:
        gpu_bytes: Memory of a GPU; None: it is not known, or the engine is on CPUs.
    """
    return 1024 if gpu_bytes and gpu_bytes >= LARGE_GPU_BYTES else 256


def cpu_sequence_bytes(bytes_per_token: int, max_model_len: int) -> int:
    """KV cache on CPU that holds one sequence of full length: vLLM takes no less."""
    blocks = -(-max_model_len // CPU_BLOCK_TOKENS) + 1  # one more: vLLM keeps an empty block
    return blocks * CPU_BLOCK_TOKENS * bytes_per_token


def default_cpu_kv_bytes(bytes_per_token: int, max_model_len: int) -> int:
    """Room for a batch of full-length sequences within 0.5 to 2 GiB, but for one in any case.

    It is the cache of each process of an engine on CPU where `rollout.engine.kv_cache_gb` is null.
    """
    sequence = cpu_sequence_bytes(bytes_per_token, max_model_len)
    smallest, largest = CPU_KV_BYTES
    return max(sequence, smallest, min(largest, CPU_SEQUENCES * sequence))
