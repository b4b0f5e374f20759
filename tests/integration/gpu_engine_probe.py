"""Print what vLLM makes of the arguments that raypo gives an engine on GPUs.

Args: a model's folder. Prints one line of JSON.
"""

import json
import sys
from contextlib import suppress
from dataclasses import fields
from typing import Any
from unittest.mock import Mock, patch

import torch

from raypo.config import EngineSection, FrozenSection, LoraSection
from raypo.serving import vllm_frozen, vllm_settings
from raypo.serving.adapters import lora_arguments
from raypo.serving.model_tensors import ModelTensors
from raypo.serving.vllm_settings import engine_arguments, prepare_environment

# Outside of a run nothing decides `sleep: auto`, and undecided engines do not sleep.
TWO = EngineSection(tensor_parallel=2, sleep=True)
ENGINES = {
    "default": EngineSection(sleep=True),
    "undecided": EngineSection(),
    "no sleep": EngineSection(sleep=False, prefix_caching=False),
    "two GPUs": TWO,
    "sized": EngineSection(kv_cache_gb=1.5, gpu_memory_fraction=0.3, extra={"max_num_seqs": 64}),
}


def engines(model: str, dtype: str) -> dict[str, dict[str, Any]]:
    shape: dict[str, Any] = {"dtype": dtype, "max_model_len": 300, "seed": 1, "device": "cuda"}
    tensors = ModelTensors.of(model)
    given = {name: engine_arguments(model, each, **shape) for name, each in ENGINES.items()}
    adapters = lora_arguments(LoraSection(rank=12), tensors, max_adapters=2)
    return given | {
        "adapters": given["default"] | adapters,
        "adapters on two GPUs": given["two GPUs"] | adapters,
        "probes": engine_arguments(model, EngineSection(), **shape, probes=8),
        "batches": engine_arguments(model, EngineSection(), **shape, whole_batches=True),
        "few sequences": engine_arguments(
            model, EngineSection(extra={"max_num_seqs": 20}), **shape, whole_batches=True
        ),
        "own graphs": engine_arguments(
            model,
            EngineSection(extra={"compilation_config": {"cudagraph_capture_sizes": [1, 2]}}),
            **shape,
            whole_batches=True,
        ),
        "reads text": engine_arguments(model, EngineSection(), **shape, reads_text=True),
    }


def frozen(model: str, dtype: str, devices: int) -> dict[str, Any]:
    """The arguments that a frozen model hands to vLLM."""
    section = FrozenSection(backend="vllm", tensor_parallel=devices)

    class Started(Exception):
        pass

    start = Mock(side_effect=Started)
    with patch.object(vllm_frozen, "start_llm", start), suppress(Started):
        vllm_frozen.VllmReference(model, section=section, dtype=dtype, max_model_len=300)
    return start.call_args.args[0]


def resolved(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the engine config that vLLM makes of the arguments."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    assert arguments.keys() <= {each.name for each in fields(EngineArgs)}
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    return {
        "model_runner": 2 if config.use_v2_model_runner else 1,
        "worker": config.parallel_config.worker_cls,
        "extension": config.parallel_config.worker_extension_cls,
        "executor": config.parallel_config.distributed_executor_backend,
        "devices": config.parallel_config.world_size,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "sleeps": config.model_config.enable_sleep_mode,
        "logprobs": config.model_config.logprobs_mode,
        "sequences": config.scheduler_config.max_num_seqs,
        "policy": config.scheduler_config.policy,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "kv_bytes": config.cache_config.kv_cache_memory_bytes,
        "memory": config.cache_config.gpu_memory_utilization,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "rank": config.lora_config and config.lora_config.max_lora_rank,
        "adapters": config.lora_config and config.lora_config.max_loras,
        "targets": config.lora_config and sorted(config.lora_config.target_modules or ()),
    }


def main() -> None:
    prepare_environment(eager=False)
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops import topk_topp_sampler

    assert current_platform.is_cuda()
    sampler = topk_topp_sampler.flashinfer_sampler_supported()
    told: dict[str, Any] = {"vllm": vllm.__version__, "uses_flashinfer": sampler, "engines": {}}
    with (
        patch.object(torch.cuda, "is_available", return_value=True),  # has no devices to use
        patch("vllm.config.vllm.HAS_TRITON", True),  # it looks for a driver
        patch.object(vllm_settings, "check_version"),  # to try one before it is allowed
    ):
        model = sys.argv[1]
        for dtype in ("bfloat16", "float32"):
            given = engines(model, dtype)
            given["frozen"] = frozen(model, dtype, 1)
            given["frozen on two GPUs"] = frozen(model, dtype, 2)
            for name, arguments in given.items():
                told["engines"][f"{dtype} {name}"] = resolved(arguments)
    told["has_cuda_context"] = torch.cuda.is_initialized()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
