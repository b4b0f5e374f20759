"""Each name inside vLLM that raypo uses is in vLLM's sources, and takes the arguments it is given.

Nothing is imported. Where a new version fails here, `serving/inside_vllm.py`,
`serving/lean_scheduler.py` and `serving/vllm_processes.py` have to follow it; what vLLM promises
(`vllm.LLM`, `SamplingParams`) is checked too, for it changes as well. The sources are those of the
installed vLLM, or of the unpacked wheel that RAYPO_VLLM names (`scripts/gpu_build.sh`).
"""

from __future__ import annotations

import ast
import os
from functools import cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path

import pytest

import raypo.serving

ATTRIBUTE = "="
CLASSES: dict[str, dict[str, str]] = {
    "entrypoints/llm.py:LLM": {
        "enqueue": "prompts, params, lora_request=adapters, priority=priorities, use_tqdm=False",
        "generate": "prompts, parameters, use_tqdm=False",
        "reset_prefix_cache": "reset_running_requests=True",
        "collective_rpc": "'raypo_answer', args=('raypo_begin_push',)",
        "sleep": "level=2",
        "wake_up": "tags=['weights']",
    },
    "entrypoints/pooling/offline.py:PoolingOfflineMixin": {
        "encode": "prompts, parameters, use_tqdm=False, pooling_task='classify'"
    },
    "v1/engine/llm_engine.py:LLMEngine": {
        "step": "",
        "abort_request": "[name], internal=True",
        "has_unfinished_requests": "",
        "vllm_config": "=",
        "model_config": "=",
        "output_processor": "=",
        "engine_core": "=",
        "model_executor": "=",
    },
    "v1/engine/output_processor.py:OutputProcessor": {"request_states": "="},
    "v1/engine/output_processor.py:RequestState": {
        "external_req_id": "=",
        "logprobs_processor": "=",
    },
    "v1/engine/logprobs.py:LogprobsProcessor": {"logprobs": "=", "prompt_logprobs": "="},
    "logprobs.py:FlatLogprobs": {"token_ids": "=", "logprobs": "="},
    "v1/engine/core_client.py:InprocClient": {"engine_core": "=", "shutdown": ""},
    "v1/engine/core.py:EngineCore": {"scheduler": "=", "batch_queue": "="},
    "v1/core/sched/scheduler.py:Scheduler": {
        "requests": "=",
        "kv_cache_manager": "=",
        "set_pause_state": "state",
        "reset_prefix_cache": "reset_running_requests=True",
        "block_size": "=",
        "max_model_len": "=",
        "add_request": "request",
        "update_from_output": "scheduler_output, model_runner_output",
        "make_spec_decoding_stats": (
            "stats, num_draft_tokens=4, num_accepted_tokens=2, num_invalid_spec_tokens=None, "
            "request_id=name"
        ),
    },
    "v1/core/sched/async_scheduler.py:AsyncScheduler": {},
    "v1/core/sched/output.py:SchedulerOutput": {"num_scheduled_tokens": "="},
    "v1/outputs.py:ModelRunnerOutput": dict.fromkeys(
        ("sampled_token_ids", "req_id_to_index", "logprobs"), "="
    ),
    "v1/outputs.py:LogprobsLists": {"logprobs": "=", "cu_num_generated_tokens": "="},
    "v1/engine/__init__.py:EngineCoreOutputs": {"outputs": "="},
    "v1/engine/__init__.py:EngineCoreOutput": dict.fromkeys(
        ("request_id", "new_token_ids", "finish_reason"), "="
    ),
    "v1/core/kv_cache_coordinator.py:KVCacheCoordinator": {"single_type_managers": "="},
    "v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager": dict.fromkeys(
        ("req_to_blocks", "num_cached_block", "block_size", "enable_caching"), "="
    ),
    "v1/kv_cache_interface.py:FullAttentionSpec": {
        "sliding_window": "=",
        "attention_chunk_size": "=",
    },
    "v1/kv_cache_interface.py:KVCacheConfig": {"kv_cache_groups": "="},
    "v1/core/sched/interface.py:PauseState": {"PAUSED_ALL": "=", "UNPAUSED": "="},
    "v1/core/kv_cache_manager.py:KVCacheManager": {
        "usage": "",
        "coordinator": "=",
        "empty_kv_cache_blocks": "=",
        "allocate_slots": "request, num_new_tokens, num_lookahead_tokens=0",
        "cache_blocks": "request, computed",
    },
    "v1/request.py:Request": {
        "num_tokens": "",
        "num_output_tokens": "",
        "update_block_hashes": "",
    }
    | dict.fromkeys(
        (
            *("num_preemptions", "num_computed_tokens", "num_output_placeholders", "status"),
            *("_output_token_ids", "_all_token_ids", "num_prompt_tokens", "max_tokens"),
            *("sampling_params", "structured_output_request", "mm_features", "resumable"),
        ),
        "=",
    ),
    "v1/request.py:RequestStatus": {"RUNNING": "="},
    "v1/executor/multiproc_executor.py:MultiprocExecutor": {"is_failed": "="},
    "v1/worker/worker_base.py:WorkerBase": {
        "add_lora": "request",
        "remove_lora": "number",
        "vllm_config": "=",
        "device": "=",
    },
    "v1/worker/gpu_worker.py:Worker": {
        "sleep": "level=2",
        "wake_up": "tags=['kv_cache']",
        "model_runner": "=",
        "device": "=",
    },
    "v1/worker/gpu_model_runner.py:GPUModelRunner": {"get_model": ""},
    "v1/worker/gpu/model_runner.py:GPUModelRunner": {"get_model": ""},
    "model_executor/layers/vocab_parallel_embedding.py:ParallelLMHead": {},
    "model_executor/layers/vocab_parallel_embedding.py:VocabParallelEmbedding": {
        "quant_method": "="
    },
    "platforms/cuda.py:NvmlCudaPlatform": {"get_device_total_memory": ""},
    "config/model.py:ModelConfig": {
        "enable_sleep_mode": "=",
        "runner_type": "=",
        "get_vocab_size": "",
    },
    "config/scheduler.py:SchedulerConfig": {
        "max_num_seqs": "=",
        "async_scheduling": "=",
        "get_scheduler_cls": "",
    },
    "config/parallel.py:ParallelConfig": dict.fromkeys(
        ("world_size", "pipeline_parallel_size", "decode_context_parallel_size"), "="
    ),
    "config/vllm.py:VllmConfig": dict.fromkeys(
        (
            *("model_config", "parallel_config", "scheduler_config", "kv_events_config"),
            *("speculative_config", "kv_transfer_config", "ec_transfer_config"),
        ),
        "=",
    ),
    "config/kv_events.py:KVEventsConfig": {"enable_kv_cache_events": "="},
    "lora/request.py:LoRARequest": {
        "lora_name": "=",
        "lora_int_id": "=",
        "lora_path": "=",
        "load_inplace": "=",
    },
    "engine/arg_utils.py:EngineArgs": dict.fromkeys(
        (
            *("worker_extension_cls", "enable_sleep_mode", "scheduling_policy", "logprobs_mode"),
            *("kv_cache_memory_bytes", "skip_tokenizer_init", "max_num_seqs", "load_format"),
            *("lora_target_modules", "max_loras", "max_cpu_loras", "max_lora_rank"),
            "scheduler_cls",
        ),
        "=",
    ),
    "sampling_params.py:SamplingParams": dict.fromkeys(
        (
            *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "detokenize"),
            *("stop_token_ids", "stop", "ignore_eos", "logprobs", "prompt_logprobs"),
            *("flat_logprobs", "repetition_detection", "skip_clone"),
        ),
        "=",
    )
    | {"eos_token_id": ""},
}
"""By file and class: methods with the arguments that they are given, and attributes."""

OF_EXPERTS: dict[str, dict[str, str]] = {
    "model_executor/layers/fused_moe/runner/moe_runner.py:MoERunner": {
        "layer_id": "",
        "router": "=",
        "routed_experts": "=",
    },
    "model_executor/layers/fused_moe/router/base_router.py:BaseRouter": {
        "set_capture_fn": "write",
        "top_k": "=",
        "global_num_experts": "=",
    },
    "forward_context.py:ForwardContext": {"slot_mapping": "="},
    "v1/kv_cache_interface.py:KVCacheConfig": {"kv_cache_groups": "=", "num_blocks": "="},
    "v1/kv_cache_interface.py:KVCacheGroupSpec": {"kv_cache_spec": "="},
    "v1/core/kv_cache_manager.py:KVCacheManager": {"free": "request", "get_block_ids": "name"},
    "v1/worker/gpu_model_runner.py:GPUModelRunner": {"kv_cache_config": "=", "device": "="},
    "v1/worker/gpu/model_runner.py:GPUModelRunner": {"kv_cache_config": "=", "device": "="},
}
"""The same for `serving/expert_store.py`, which needs a vLLM that reports experts on CPUs."""

FUNCTIONS = {
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_reload": "model, model_config",
    },
    "config/vllm.py": {"set_current_vllm_config": "vllm_config"},
    "v1/sample/rejection_sampler.py": {
        "expand_batch_to_tokens": "values, ends, num_tokens, replace_from=0, replace_to=1"
    },
}

PASSAGES = {
    "v1/core/sched/scheduler.py": [
        # In _preempt_request, which reset_prefix_cache calls.
        "request.num_preemptions += 1",
        "self._preempt_request(request",
        # lean_scheduler.py does the same for a token that ends nothing.
        "request.append_output_token_ids(output_token_id)",
        "request.async_tokens_to_discard = |request.num_stale_output_tokens = ",
    ],
    "v1/sample/rejection_sampler.py": ["temperature = expand_batch_to_tokens("],
    "v1/core/sched/async_scheduler.py": [
        "request.num_output_placeholders -= len(new_token_ids)",
        "request, request.num_computed_tokens - request.num_output_placeholders",
    ],
    # All ends of a response that `is_plain`, `end_ids` and `max_length` cover.
    "v1/core/sched/utils.py": [
        "last_token_id == sampling_params.eos_token_id",
        "last_token_id in (sampling_params.stop_token_ids or ())",
        "request.num_tokens >= max_model_len",
        "request.num_output_tokens >= request.max_tokens",
        "request.num_output_tokens < sampling_params.min_tokens",
        "repetition_detection = sampling_params.repetition_detection",
    ],
    "entrypoints/common/offline.py": ["self.llm_engine.step()"],  # which InsideVllm replaces
    "entrypoints/pooling/offline.py": ["self.llm_engine.step()|self._run_engine("],
    "v1/worker/gpu_worker.py": [
        'tag="weights"',
        'tag="kv_cache"',
        'assert freed_bytes >= 0, "Memory usage increased after sleeping',
    ],
    "v1/executor/abstract.py": ['self.collective_rpc("sleep"'],  # by name: raypo_share_device
    "model_executor/model_loader/reload/__init__.py": [
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ],
    "model_executor/layers/utils.py": ["layer.cpu_linear ="],
    "inputs/engine.py": ["cache_salt"],
    "envs.py": [
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_USE_FLASHINFER_SAMPLER",
        "VLLM_USE_V2_MODEL_RUNNER",
    ],
}
"""By file, words that must stand in it; alternatives are divided by |."""

IN_0_23 = {
    "entrypoints/pooling/offline.py:PoolingOfflineMixin": "entrypoints/llm.py:LLM",
    "entrypoints/common/offline.py": "entrypoints/offline_utils.py",
}
"""Places of the same names in 0.23."""
MIXIN = "v1/worker/lora_model_runner_mixin.py:LoRAModelRunnerMixin"


@cache
def root() -> Path:
    if "RAYPO_VLLM" in os.environ:
        return Path(os.environ["RAYPO_VLLM"], "vllm")
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def place_of(name: str) -> str:
    """A file or class where this version has it."""
    is_there = (root() / name.partition(":")[0]).is_file()
    is_there = is_there and (":" not in name or name.partition(":")[2] in classes(name))
    return name if is_there else IN_0_23.get(name, name)


def source(file: str) -> str:
    return (root() / file).read_text()


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


def classes(place: str) -> dict[str, ast.ClassDef]:
    body = tree(place.partition(":")[0]).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def attributes(cls: ast.ClassDef) -> set[str]:
    """Names that a class assigns, in its body or to itself in its methods."""
    names: set[str] = set()
    for node in ast.walk(cls):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                names.add(target.id)
            elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                names |= {target.attr} if target.value.id == "self" else set()
    return names


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    given = function.args
    named = [(each, Parameter.POSITIONAL_ONLY) for each in given.posonlyargs]
    named += [(each, Parameter.POSITIONAL_OR_KEYWORD) for each in given.args]
    defaults = [Parameter.empty] * (len(named) - len(given.defaults)) + [None] * len(given.defaults)
    parameters = [
        Parameter(each.arg, kind, default=default)
        for (each, kind), default in zip(named, defaults, strict=True)
    ]
    if given.vararg:
        parameters.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(
            each.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None
        )
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(parameters)


def functions(body: list[ast.stmt]) -> dict[str, Signature]:
    found: dict[str, Signature] = {}
    for node in body:  # of several overloads the last one is it
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = signature(node)
    return found


def assert_takes(function: Signature | None, arguments: str, place: str, *first: str) -> None:
    """Check that a call with these arguments, as Python writes them, fits."""
    assert function is not None, f"{place}() is gone"
    call = ast.parse(f"call({arguments})", mode="eval").body
    assert isinstance(call, ast.Call)
    try:
        function.bind(*first, *call.args, **{str(each.arg): None for each in call.keywords})
    except TypeError as error:
        raise AssertionError(f"{place}{function} does not take ({arguments}): {error}") from None


def test_no_other_module_looks_inside_a_running_vllm():
    """`lean_scheduler` and the workers' code run inside vLLM itself."""
    serving = Path(raypo.serving.__file__).parent
    users = {
        path.name
        for path in serving.parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("llm_engine", "engine_core")
    }
    assert users == {"inside_vllm.py"}


@pytest.mark.parametrize(
    ("place", "members"), [*CLASSES.items(), *OF_EXPERTS.items()], ids=lambda each: str(each)[-60:]
)
def test_a_class_has_what_is_asked_of_it(place: str, members: dict[str, str]):
    routers = root() / "model_executor" / "layers" / "fused_moe" / "router"
    if members in OF_EXPERTS.values() and not (routers / "cpu_router.py").is_file():
        pytest.skip("runs with this vLLM cannot replay experts")
    place = place_of(place)
    name = place.partition(":")[2]
    assert name in classes(place), f"{place} is gone"
    cls = classes(place)[name]
    methods, assigned = functions(cls.body), attributes(cls)
    for member, arguments in members.items():
        if arguments == ATTRIBUTE:
            assert member in assigned, f"{place}.{member} is gone"
        else:
            assert_takes(methods.get(member), arguments, f"{place}.{member}", "self")


@pytest.mark.parametrize("file", FUNCTIONS)
def test_functions_take_what_they_are_given(file: str):
    there = functions(tree(file).body)
    for name, arguments in FUNCTIONS[file].items():
        assert_takes(there.get(name), arguments, f"{file}:{name}")


@pytest.mark.parametrize("file", PASSAGES)
def test_words_that_are_counted_on_stand_where_they_did(file: str):
    passages, file = PASSAGES[file], place_of(file)
    for passage in passages:
        is_there = any(each in source(file) for each in passage.split("|"))
        assert is_there, f"{file} has no {passage!r} any more"


@pytest.mark.parametrize("file", ["v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"])
def test_new_base_weights_leave_no_adapter_behind_in_either_model_runner(file: str):
    """vLLM forgets adapters itself; or, as in 0.23, a push in place writes over what is there."""
    bases = {
        each.id for each in classes(file)["GPUModelRunner"].bases if isinstance(each, ast.Name)
    }
    assert "LoRAModelRunnerMixin" in bases
    mixin = classes(MIXIN)["LoRAModelRunnerMixin"]
    if "reset_lora_state" in functions(mixin.body):
        assert_takes(functions(mixin.body)["reset_lora_state"], "", MIXIN, "self")
        return
    manager = source("lora/worker_manager.py")
    in_place = manager.index("or lora_request.load_inplace")
    removed = manager.index("self._adapter_manager.remove_adapter(lora.id)")
    added = manager.index("self._adapter_manager.add_adapter(lora)", removed)
    assert (
        in_place < removed < added < manager.index("self._adapter_manager.activate_adapter", added)
    )


def test_a_signature_is_read_as_python_reads_it():
    source = "def f(self, a, b=1, *, c, d=2): ...\ndef g(self, *args, **more): ..."
    f, g = functions(ast.parse(source).body).values()
    assert_takes(f, "1, c=2", "f", "self")
    assert_takes(g, "1, 2, x=3", "g", "self")
    for wrong in ("1", "c=2", "1, 2, 3, c=4", "1, c=2, e=3"):
        with pytest.raises(AssertionError, match="does not take"):
            assert_takes(f, wrong, "f", "self")
