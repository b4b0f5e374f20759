"""What raypo asks of the inside of vLLM is in the installed sources; nothing is imported.

Where a new version fails here, `serving/inside_vllm.py` and `serving/worker_extension.py` have to
follow it; what vLLM promises (`vllm.LLM`, `SamplingParams`) is checked too, for it changes as well.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

CLASSES: dict[str, dict[str, str]] = {
    "entrypoints/llm.py:LLM": {
        "enqueue": "prompts, sampling_params, lora_request, priority, use_tqdm",
        "generate": "prompts, sampling_params, use_tqdm",
        "reset_prefix_cache": "reset_running_requests",
        "collective_rpc": "method, args",
        "sleep": "level",
        "wake_up": "tags",
    },
    "entrypoints/pooling/offline.py:PoolingOfflineMixin": {
        "encode": "prompts, pooling_params, use_tqdm, pooling_task"
    },
    "v1/engine/llm_engine.py:LLMEngine": {
        "step": "",
        "abort_request": "request_ids, internal",
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
        "detokenizer": "=",
        "logprobs_processor": "=",
    },
    "v1/engine/detokenizer.py:IncrementalDetokenizer": {
        "output_token_ids": "",
        "num_output_tokens": "",
    },
    "v1/engine/logprobs.py:LogprobsProcessor": {"logprobs": "="},
    "v1/engine/core_client.py:InprocClient": {"engine_core": "=", "shutdown": ""},
    "v1/engine/core.py:EngineCore": {"scheduler": "=", "batch_queue": "="},
    "v1/core/sched/scheduler.py:Scheduler": {
        "requests": "=",
        "kv_cache_manager": "=",
        "set_pause_state": "pause_state",
        "reset_prefix_cache": "reset_running_requests",
        "_preempt_request": "request",
    },
    "v1/core/sched/interface.py:PauseState": {"PAUSED_ALL": "=", "UNPAUSED": "="},
    "v1/core/kv_cache_manager.py:KVCacheManager": {"usage": ""},
    "v1/request.py:Request": {"num_preemptions": "="},
    "v1/executor/multiproc_executor.py:MultiprocExecutor": {"is_failed": "="},
    "v1/worker/worker_base.py:WorkerBase": {
        "add_lora": "lora_request",
        "remove_lora": "lora_id",
    },
    "v1/worker/gpu_worker.py:Worker": {"sleep": "level", "wake_up": "tags", "model_runner": "="},
    "v1/worker/gpu_model_runner.py:GPUModelRunner": {"get_model": ""},
    "v1/worker/lora_model_runner_mixin.py:LoRAModelRunnerMixin": {"reset_lora_state": ""},
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
        ),
        "=",
    ),
    "sampling_params.py:SamplingParams": dict.fromkeys(
        (
            *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
            *("stop_token_ids", "stop", "ignore_eos", "logprobs", "prompt_logprobs", "detokenize"),
        ),
        "=",
    ),
}
"""By file and class, its methods with the parameters that are given to them, and its attributes."""

FUNCTIONS = {
    "model_executor/model_loader/reload/layerwise.py": {
        "initialize_layerwise_reload": "model",
        "finalize_layerwise_reload": "*args",
    },
    "config/vllm.py": {"set_current_vllm_config": "vllm_config"},
}

PASSAGES = {
    "v1/core/sched/scheduler.py": [
        "request.num_preemptions += 1",  # in _preempt_request, which reset_prefix_cache calls
        "self._preempt_request(request, timestamp, drop_stale_output=True)",
    ],
    "entrypoints/common/offline.py": ["self.llm_engine.step()"],  # which VllmModel replaces
    "entrypoints/pooling/offline.py": ["self.llm_engine.step()"],
    "v1/worker/gpu_worker.py": ['tag="weights"', 'tag="kv_cache"'],
    "model_executor/model_loader/reload/__init__.py": [
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ],
    "model_executor/layers/utils.py": ["layer.cpu_linear ="],
    "inputs/engine.py": ["cache_salt"],
}
"""By file, words that must stand in it."""


@cache
def source(file: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0], file).read_text()


@cache
def tree(file: str) -> ast.Module:
    return ast.parse(source(file))


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


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    rest = f"*{given.vararg.arg}" if given.vararg else ""
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} | {rest}


def functions(body: list[ast.stmt]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in body:  # of several overloads the last one is it
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = parameters(node)
    return found


def wanted(names: str) -> set[str]:
    return set(filter(None, names.split(", ")))


@pytest.mark.parametrize("place", CLASSES)
def test_a_class_has_what_is_asked_of_it(place: str):
    file, _, name = place.partition(":")
    classes = {node.name: node for node in tree(file).body if isinstance(node, ast.ClassDef)}
    assert name in classes, f"{place} is gone"
    methods, assigned = functions(classes[name].body), attributes(classes[name])
    for member, given in CLASSES[place].items():
        if given == "=":
            assert member in assigned, f"{place}.{member} is gone"
            continue
        assert member in methods, f"{place}.{member}() is gone"
        assert wanted(given) <= methods[member], f"{place}.{member}() takes other arguments"


@pytest.mark.parametrize("file", FUNCTIONS)
def test_functions_are_there(file: str):
    there = functions(tree(file).body)
    for name, given in FUNCTIONS[file].items():
        assert wanted(given) <= there.get(name, set()), f"{file}:{name} takes other arguments"


@pytest.mark.parametrize("file", PASSAGES)
def test_words_that_are_counted_on_stand_where_they_did(file: str):
    for passage in PASSAGES[file]:
        assert passage in source(file), f"{file} has no {passage!r} any more"
