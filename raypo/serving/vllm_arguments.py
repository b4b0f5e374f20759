"""Validation of `rollout.engine.extra` against vLLM's engine arguments, without importing vLLM."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from raypo.config import ConfigError, EngineSection

SET_BY = {
    "dtype": "model.dtype",
    "enable_lora": "model.lora",
    "enable_prefix_caching": "rollout.engine.prefix_caching",
    "enable_sleep_mode": "rollout.engine.sleep",
    "gpu_memory_utilization": "rollout.engine.gpu_memory_fraction",
    "kv_cache_dtype": "rollout.engine.kv_cache_dtype",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_gb",
    "max_lora_rank": "model.lora.rank",
    "max_loras": "model.lora",
    "max_model_len": "data.max_prompt_tokens and rollout.max_new_tokens",
    "model": "model.policy",
    "quantization": "rollout.engine.quantization",
    "seed": "seed",
    "speculative_config": "rollout.engine.speculation",
    "tensor_parallel_size": "rollout.engine.tensor_parallel",
}
"""Config keys that set an engine argument of vLLM, by the name of the argument."""
SAID_BY_REQUESTS = {
    "max_tokens": "rollout.max_new_tokens",
    **{name: f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
}
"""Config key that sets a sampling parameter of vLLM, by the name of the parameter. Sampling
parameters are not engine arguments."""
FIXED = {
    "distributed_executor_backend": "weights are pushed into processes that raypo knows",
    "generation_config": "sampling follows the rollout section alone",
    "load_format": "weights arrive through raypo's pushes",
    "logprobs_mode": (
        "training needs the log-probs of the distribution that the tokens were sampled from"
    ),
    "scheduling_policy": (
        "requests have priorities; equal priorities are served in order of arrival"
    ),
    "skip_tokenizer_init": "prompts and responses are token ids",
    "worker_extension_cls": "raypo's own extension loads the weights",
}
"""Engine arguments of vLLM that users cannot set, each with the reason."""


def check_extra(section: EngineSection) -> None:
    """Raise on arguments that are fixed, set by another key, or unknown to the installed vLLM.

    If vLLM is not installed here, unknown arguments pass. Each engine checks again on its own node.

    Raises:
        ConfigError: names the first invalid key.
    """
    known, elsewhere = engine_argument_names(), SET_BY | SAID_BY_REQUESTS
    for name, value in section.extra.items():
        key = f"rollout.engine.extra.{name} ({value!r})"
        if name in elsewhere:
            raise ConfigError(
                f"{key}: is set through {elsewhere[name]}. Set that instead, and remove this."
            )
        if name in FIXED:
            raise ConfigError(f"{key}: cannot be changed, because {FIXED[name]}. Remove it.")
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            hint = f"Did you mean {near[0]}?" if near else "Remove it."
            raise ConfigError(f"{key}: the installed vLLM has no such engine argument. {hint}")


def check_head_dtype(head_dtype: str) -> None:
    """Refuse a head in float32 if the installed vLLM (before 0.26) ignores it.

    If vLLM is not installed here, the setting passes.

    Raises:
        ConfigError: names the key.
    """
    source = _vllm_file("model_executor/layers/logits_processor.py")
    if head_dtype != "model" and source and "head_dtype" not in source.read_text():
        raise ConfigError(
            f"model.head_dtype ({head_dtype}): the installed vLLM computes all logits in "
            "model.dtype. Install vLLM 0.26 or later, or set model.head_dtype to model."
        )


def check_router_replay(router_replay: str) -> None:
    """Refuse a replay of experts if the installed vLLM (0.23) does not report them on CPUs.

    If vLLM is not installed here, the setting passes.

    Raises:
        ConfigError: names the key.
    """
    source = _vllm_file("model_executor/layers/fused_moe/router/cpu_router.py")
    if router_replay != "off" and source and not source.is_file():
        raise ConfigError(
            f"rollout.router_replay ({router_replay}): the installed vLLM cannot report the "
            "experts that it chooses. Install vLLM 0.32, or set rollout.router_replay to off."
        )


def check_speculation(kind: str) -> None:
    """Refuse to draft tokens with a vLLM (0.23) that keeps those behind a stop string.

    The same version fails to draft on CPUs. If vLLM is not installed here, the setting passes.

    Raises:
        ConfigError: names the key.
    """
    source = _vllm_file("v1/engine/output_processor.py")
    if kind != "none" and source and "_trim_surplus_tokens" not in source.read_text():
        raise ConfigError(
            f"rollout.engine.speculation.kind ({kind}): the installed vLLM is too old for it. "
            "Install vLLM 0.32, or set rollout.engine.speculation.kind to none."
        )


def with_head_dtype(section: EngineSection, head_dtype: str) -> EngineSection:
    """Return the settings of engines that compute their logits in `model.head_dtype`.

    Raises:
        ConfigError: `extra.hf_overrides` is no mapping.
    """
    if head_dtype == "model":
        return section
    overrides = section.extra.get("hf_overrides") or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"rollout.engine.extra.hf_overrides ({overrides!r}): has to be a mapping, because "
            "model.head_dtype adds to it. Write it as one."
        )
    extra = {**section.extra, "hf_overrides": {**overrides, "head_dtype": head_dtype}}
    return section.model_copy(update={"extra": extra})


@cache
def engine_argument_names() -> frozenset[str] | None:
    """Return the field names of vLLM's class `EngineArgs`. None means that the class was not found.

    The source is parsed, which takes 0.1 s, because importing vLLM takes 10 s or more.
    """
    source = _vllm_file("engine/arg_utils.py")
    if source is None or not source.is_file():
        return None
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs" and not node.bases:
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    return None


def _vllm_file(name: str) -> Path | None:
    """Return the path of a file of the installed vLLM without importing it; None without vLLM."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent / name if spec and spec.origin else None
