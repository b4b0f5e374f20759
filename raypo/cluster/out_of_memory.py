"""Out-of-memory errors that name the config keys to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypo.cluster.actors import DeploymentError

LEARNER_REMEDY = (
    "Lower learner.max_tokens_per_microbatch, raise learner.zero_stage or learner.num_workers "
    "(learner.critic_workers for a critic on its own workers), use model.dtype bfloat16, or "
    "lower rollout.engine.gpu_memory_fraction; `raypo plan` shows how much each of these saves."
)
ENGINE_REMEDY = (
    "Lower rollout.engine.gpu_memory_fraction or set rollout.engine.kv_cache_gb, lower "
    "data.max_prompt_tokens or rollout.max_new_tokens; `raypo plan` shows what each role needs."
)
FROZEN_REMEDY = (
    "Lower learner.max_tokens_per_microbatch, set placement.mode to dedicated for it, or "
    "placement.frozen.*.backend to vllm with tensor_parallel; `raypo plan` shows what each role "
    "needs."
)

_ERROR_TEXTS = (
    "out of memory",
    "can't allocate memory",  # torch on a CPU
    "no available memory for the cache blocks",  # vLLM, like the next two
    "less than desired gpu memory utilization",
    "is larger than the available kv cache memory",
)


class OutOfMemory(RuntimeError):
    """A device or the machine ran out of memory."""


@contextmanager
def memory_advice(process_name: str, remedy: str) -> Iterator[None]:
    """Replace an out-of-memory error by an error that names the process and the remedy.

    Args:
        process_name: Name of the process or model, for the message.
        remedy: Sentence that names the keys to change.

    Raises:
        OutOfMemory: torch or vLLM ran out of memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError, ValueError) as error:
        # Replica errors already include the advice.
        if isinstance(error, OutOfMemory | DeploymentError) or not _is_about_memory(error):
            raise
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no details"
        raise OutOfMemory(f"{process_name} ran out of memory: {first_line}. {remedy}") from error


def _is_about_memory(error: BaseException) -> bool:
    text = str(error).lower()
    is_memory_error = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_memory_error or any(error_text in text for error_text in _ERROR_TEXTS)
