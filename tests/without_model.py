"""vLLM whole but for its model: real engine, scheduler and output processor around made-up tokens.

Thousands of steps a minute, synchronous as on CPU or one step ahead of the outputs as on GPUs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raypo.serving.inside_vllm import InsideVllm
from raypo.serving.vllm_settings import SCHEDULER, import_vllm, prepare_environment

prepare_environment(eager=True)
import_vllm()

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.executor.abstract import Executor  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput  # noqa: E402

Sample = Callable[[int, int], tuple[list[int], np.ndarray]]
"""Tokens and their log-probs [N], by (step, N)."""


class WithoutModel(Executor):
    """An executor without workers; `start_without_model` sets what it samples."""

    supports_pp = False

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.sample: Sample = lambda step, count: ([5] * count, np.zeros(count, np.float32))
        self.scheduler: Any = None
        self.steps: list[Any] = []
        """Steps that the scheduler handed over, if `keeps_steps`."""
        self.keeps_steps = False
        self._step = 0
        self._output: ModelRunnerOutput | None = None

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        config = self.vllm_config
        spec = FullAttentionSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=1,
            head_size=32,
            dtype=torch.float32,
        )
        answers = {
            "get_kv_cache_spec": {"layer": spec},
            "determine_available_memory": config.cache_config.kv_cache_memory_bytes,
            "get_supported_kv_cache_layouts": ["LBHNC"],
            "compile_or_warm_up_model": SimpleNamespace(language_model=0.0, encoder=0.0),
            "get_supported_tasks": ("generate",),
        }
        return [answers.get(method)]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if self.keeps_steps:
            self.steps.append(handed_over(scheduler_output))
        names = [*scheduler_output.num_scheduled_tokens]
        tokens, log_probs = self.sample(self._step, len(names))
        self._step += bool(names)
        requests = self.scheduler.requests
        self._output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            # While a part of a prompt is missing, nothing is sampled.
            sampled_token_ids=[
                [] if requests[name].is_prefill_chunk else [token]
                for name, token in zip(names, tokens, strict=True)
            ],
            logprobs=LogprobsLists(
                np.array(tokens, np.int32)[:, None],
                log_probs[:, None],
                np.ones(len(names), np.int32),
            )
            if names
            else None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        return answered(None if names else self._output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return answered(self._output, non_block)

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


def answered(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def handed_over(scheduler_output: Any) -> dict[str, Any]:
    """Return the part of a step that the model runner reads."""
    new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
    return {
        "counts": [*scheduler_output.num_scheduled_tokens.items()],
        "new": [(each.req_id, each.block_ids, each.num_computed_tokens) for each in new],
        "cached": (
            [*cached.req_ids],
            [*cached.new_block_ids],
            [*cached.num_computed_tokens],
            [*cached.num_output_tokens],
            {name: [*ids] for name, ids in cached.all_token_ids.items()},
            sorted(cached.resumed_req_ids),
        ),
        "ended": sorted(scheduler_output.finished_req_ids),
        "preempted": sorted(scheduler_output.preempted_req_ids or ()),
    }


def random_sample(seed: int, vocabulary: range) -> Sample:
    def sample(step: int, count: int) -> tuple[list[int], np.ndarray]:
        chance = random.Random(f"{seed} {step}")
        tokens = chance.choices(vocabulary, k=count)
        return tokens, -np.array([chance.random() for _ in tokens], np.float32)

    return sample


@contextmanager
def ahead_of_outputs(is_ahead: bool) -> Iterator[None]:
    """Let vLLM on CPU schedule a step before it has the outputs of the last one, as on GPUs."""
    usual = type(current_platform).check_and_update_config

    def as_it_was(cls: Any, vllm_config: Any) -> None:
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_ahead

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "check_and_update_config", classmethod(as_it_was))
        patch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
        yield


def start_without_model(
    folder: str, *, is_lean: bool, is_ahead: bool, blocks: int, block_size: int, **arguments: Any
) -> Any:
    """A `vllm.LLM` without a model, under raypo's scheduler or vLLM's."""
    import vllm

    with ahead_of_outputs(is_ahead):
        llm = vllm.LLM(
            **{
                "model": folder,
                "dtype": "float32",
                "distributed_executor_backend": WithoutModel,
                "scheduling_policy": "priority",
                "scheduler_cls": SCHEDULER if is_lean else None,
                "disable_log_stats": True,
                "enforce_eager": True,
                "block_size": block_size,
                "kv_cache_memory_bytes": blocks * block_size * 2 * 32 * 4,
            }
            | arguments
        )
    core: Any = InsideVllm(llm)._core
    core.model_executor.scheduler = core.scheduler
    return llm
