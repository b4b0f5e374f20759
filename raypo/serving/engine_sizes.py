"""Default sizes of an engine: its sequences, and its KV cache on CPU."""

from __future__ import annotations

from raypo.config import OnlineConfig, PolicyExamplesConfig

LARGE_GPU_BYTES = 70 * 1024**3
"""GPU memory, in bytes, from which an engine has larger defaults."""
CPU_BLOCK_TOKENS = 128
"""Tokens in a block of an engine's KV cache on CPU."""
CPU_SEQUENCES = 32
"""Full-length sequences that the default KV cache on CPU holds, if `CPU_KV_BYTES` permits."""
CPU_KV_BYTES = (1 << 29, 1 << 31)
"""Minimum and maximum bytes of the default KV cache on CPU."""


def engine_sequences(gpu_bytes: int | None, max_requests: int | None = None) -> int:
    """Return the default for the maximum number of concurrent sequences of an engine.

    The values are those of vLLM 0.32. The number is higher on GPUs with `LARGE_GPU_BYTES` or more;
    vLLM itself makes an exception for the A100. Each concurrent sequence takes memory for three
    rows of float32 logits, and vLLM captures CUDA graphs up to this number.

    Args:
        gpu_bytes: Memory of one GPU. None means that it is unknown, or that the engine runs on
            CPUs.
        max_requests: Most requests that the engine has at a time (`max_requests_of`). None means
            that it is unknown.
    """
    most = 1024 if gpu_bytes and gpu_bytes >= LARGE_GPU_BYTES else 256
    return most if max_requests is None else min(most, max_requests)


def max_requests_of(config: OnlineConfig | PolicyExamplesConfig, *, num_engines: int) -> int | None:
    """Return the most requests that an engine has at a time, or None if the config does not say.

    Agents may send several requests at a time, and only the files of held-out prompts say how many
    there are. If there are several engines, one may get the requests of a lost one too.
    """
    if not isinstance(config, OnlineConfig) or config.rollout.agent or config.eval.prompts:
        return None
    rollout = config.rollout
    batches = rollout.staleness + 1 if rollout.has_requests_in_flight else 1
    requests = batches * rollout.prompts_per_step * rollout.samples_per_prompt
    share = -(-requests // num_engines)  # the sampler's equal parts (`rollout/collect.py`)
    return 2 * share if num_engines > 1 else share


def engine_batched_tokens(gpu_bytes: int | None) -> int:
    """Return vLLM's default for the maximum number of tokens of a pass on a GPU."""
    return 16384 if gpu_bytes and gpu_bytes >= LARGE_GPU_BYTES else 8192


def cpu_sequence_bytes(bytes_per_token: int, max_model_len: int) -> int:
    """Return the bytes of the smallest CPU KV cache that vLLM accepts: one full-length sequence."""
    blocks = -(-max_model_len // CPU_BLOCK_TOKENS) + 1  # one more: vLLM keeps an empty block
    return blocks * CPU_BLOCK_TOKENS * bytes_per_token


def default_cpu_kv_bytes(bytes_per_token: int, max_model_len: int) -> int:
    """Return the default bytes of the KV cache of each process of an engine on CPU.

    It holds `CPU_SEQUENCES` full-length sequences within 0.5 to 2 GiB, and always at least one.
    It applies if `rollout.engine.kv_cache_gb` is null.
    """
    sequence = cpu_sequence_bytes(bytes_per_token, max_model_len)
    smallest, largest = CPU_KV_BYTES
    return max(sequence, smallest, min(largest, CPU_SEQUENCES * sequence))
