"""raypo's scheduler decides, samples and ends as vLLM's own, step by step, on random schedules.

Two vLLMs without a model get the same calls and, as long as their steps are equal, the same tokens.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from raypo.serving import lean_scheduler
from raypo.serving.inside_vllm import InsideVllm, sampled
from raypo.serving.lean_scheduler import why_not_lean
from raypo.serving.requests import SamplingRequest
from raypo.serving.vllm_requests import completion_of, sampling_params, vllm_prompt
from tests.tiny import tiny_policy
from tests.without_model import random_sample, start_without_model

MAX_MODEL_LEN = 64
LETTERS = range(14, 18)
"""Few tokens, so that prompts and responses share prefixes: the letters a to d."""
SCHEDULES = int(os.environ.get("RAYPO_SCHEDULES", "12"))
"""Schedules of each setting."""
SETTINGS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous": {"is_ahead": True},
    "model runner V2": {"is_ahead": True, "is_v2": True},
    "preemptions": {"is_ahead": True, "blocks": 24},
    "preemptions, synchronous": {"blocks": 24},
    "chunks of prompts": {"is_ahead": True, "max_num_batched_tokens": 12, "blocks": 40},
    "no prefix cache": {"is_ahead": True, "enable_prefix_caching": False, "blocks": 24},
    "long blocks": {"is_ahead": True, "blocks": 14, "block_size": 16},
}


Call = Callable[["Twin"], object]


class Twin:
    """One of two vLLMs, as raypo's loop uses it."""

    def __init__(self, folder: str, is_lean: bool, is_v2: bool, **settings: Any) -> None:
        llm = start_without_model(folder, is_lean=is_lean, max_model_len=MAX_MODEL_LEN, **settings)
        self.inside = InsideVllm(llm)
        self.scheduler.use_v2_model_runner = is_v2
        self.executor = llm.llm_engine.engine_core.engine_core.model_executor
        self.executor.keeps_steps = True
        self.running: dict[str, Any] = {}
        """The scheduler's requests, by name."""
        self.results: list[tuple[str, str, list[int], list[float]]] = []

    @property
    def scheduler(self) -> Any:
        return self.inside.llm.llm_engine.engine_core.engine_core.scheduler

    def enter(self, requests: list[tuple[SamplingRequest, int]]) -> None:
        params = [sampling_params(request) for request, _ in requests]
        for each, (_, min_tokens) in zip(params, requests, strict=True):
            each.min_tokens = min_tokens
        names = self.inside.enqueue(
            [vllm_prompt(request) for request, _ in requests],
            params,
            [None] * len(requests),
            [request.priority for request, _ in requests],
        )
        self.running |= {name: self.inside.scheduled(name) for name in names}

    def step(self) -> bool:
        for output in self.inside.step():
            if output.finished:
                (said,) = output.outputs
                scheduled = self.running.pop(output.request_id)
                self._keep(output.request_id, said.finish_reason, scheduled, said.logprobs)
        return True

    def abort(self, name: str) -> None:
        flat = self.inside.state(name).logprobs_processor.logprobs
        self.inside.abort(name)
        self._keep(name, "aborted", self.running.pop(name), flat)

    def _keep(self, name: str, reason: str, scheduled: Any, flat: Any) -> None:
        tokens, log_probs = sampled(scheduled, flat)
        self.results.append((name, reason, [*tokens], [*log_probs]))

    def push(self, in_flight: str) -> None:
        self.inside.drain_steps(self.step)
        if in_flight == "restart":
            for name in [*self.running]:
                self.abort(name)
        if in_flight != "keep":
            assert self.inside.reset_kv_cache(include_running=bool(self.running))

    def sleep(self) -> None:
        for name in [*self.running]:
            self.abort(name)
        assert self.inside.reset_kv_cache() or self.inside.step() == []

    def state(self) -> dict[str, Any]:
        """All that later decisions depend on."""
        manager, pool = self.scheduler.kv_cache_manager, self.scheduler.kv_cache_manager.block_pool
        (blocks,) = manager.coordinator.single_type_managers
        counters = "num_computed_tokens", "num_output_placeholders", "num_preemptions", "status"
        counters += tuple(
            name
            for name in ("num_in_flight_tokens", lean_scheduler.STALE)
            if all(hasattr(each, name) for each in self.running.values())
        )
        return {
            "running": [each.request_id for each in self.scheduler.running],
            "waiting": sorted(each.request_id for each in self.scheduler.waiting),
            "free": [each.block_id for each in pool.free_block_queue.get_all_free_blocks()],
            "hashes": [each.block_hash for each in pool.blocks],
            "cached": dict(blocks.num_cached_block),
            "requests": {
                name: (
                    [getattr(each, counter) for counter in counters],
                    each.prefill_stats is None,
                    [*each.all_token_ids],
                    [*each.block_hashes],
                    [*sampled(each, None if hasattr(each, "log_probs") else self._flat(name))[1]],
                )
                for name, each in self.running.items()
            },
        }

    def _flat(self, name: str) -> Any:
        return self.inside.state(name).logprobs_processor.logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("policy")))


def random_request(chance: random.Random) -> tuple[SamplingRequest, int]:
    start = [14, 15, 16, 17] * 4 if chance.random() < 0.6 else []
    prompt = start + chance.choices(LETTERS, k=chance.randint(1, 20))
    length = chance.randint(1, MAX_MODEL_LEN - len(prompt))
    stops: dict[str, Any] = {} if chance.random() < 0.6 else {"stop_token_ids": (17,)}
    if chance.random() < 0.2:
        stops = {"stop": ("abc", "ddd")}
    request = SamplingRequest(
        np.array(prompt, np.int32),
        length,
        1.0,
        priority=chance.choice([0, 0, 0, 1, -1]),
        cache_salt=chance.choice(["", "", "new"]),
        **stops,
    )
    return request, chance.choice([0, 0, min(3, length)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_schedules_are_those_of_vllms_own_scheduler(folder: str, setting: str):
    settings: dict[str, Any] = {"is_ahead": False, "is_v2": False, "blocks": 200, "block_size": 4}
    settings |= {"max_num_seqs": 8, "enable_prefix_caching": True} | SETTINGS[setting]
    twins = [Twin(folder, is_lean, **settings) for is_lean in (False, True)]
    vllms_own, lean = twins
    assert isinstance(lean.scheduler, lean_scheduler._Lean)
    assert not isinstance(vllms_own.scheduler, lean_scheduler._Lean)
    reasons: set[str] = set()
    preemptions, hits = 0, 0

    for seed in range(SCHEDULES):
        for twin in twins:
            twin.executor.sample, twin.executor._step = random_sample(seed, LETTERS), 0
        for call in random_calls(random.Random(f"{setting} {seed}"), vllms_own.running):
            for twin in twins:
                call(twin)
            assert vllms_own.executor.steps == lean.executor.steps
            assert vllms_own.results == lean.results
            assert vllms_own.state() == lean.state()
            for step in lean.executor.steps:
                preemptions += len(step["preempted"])
                hits += sum(num_computed > 0 for _, _, num_computed in step["new"])
            reasons |= {reason for _, reason, _, _ in lean.results}
            for twin in twins:
                twin.executor.steps.clear()
                twin.results.clear()

    assert reasons == {"length", "stop", "aborted"}
    assert (hits > 0) == settings["enable_prefix_caching"]
    assert preemptions or not setting.startswith("preemptions")


def random_calls(chance: random.Random, running: Mapping[str, Any]) -> Iterator[Call]:
    """Yield random calls until twelve requests have entered and ended.

    Args:
        chance: Source of randomness.
        running: Requests that run, by name; read between two calls.
    """
    left = 12
    while left or running:
        number = chance.random()
        if left and number < 0.15:
            requests = [random_request(chance) for _ in range(min(left, chance.randint(1, 4)))]
            left -= len(requests)
            yield partial(Twin.enter, requests=requests)
        elif number < 0.18:
            yield partial(
                Twin.push,
                in_flight=chance.choice(["keep", "keep", "recompute", "recompute", "restart"]),
            )
        elif not running:
            continue
        elif number < 0.2:
            yield partial(Twin.abort, name=chance.choice([*running]))
        elif number < 0.21:  # vLLM itself may reset the cache between a step and its outputs
            yield lambda twin: twin.inside.reset_kv_cache(include_running=True)
        elif number < 0.212:
            yield Twin.sleep
        else:
            yield Twin.step


def why_not(
    *,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    specs: tuple[Any, ...] = (),
    **more: Any,
) -> str | None:
    """The reason against raypo's scheduler, for a plain configuration with some changes."""
    plain = dict.fromkeys(
        ("kv_events_config", "speculative_config", "kv_transfer_config", "ec_transfer_config")
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    models = SimpleNamespace(**({"runner_type": "generate"} | (model or {})))
    vllm_config = SimpleNamespace(
        **({"model_config": models, "parallel_config": parallel} | plain | (config or {}))
    )
    groups = [SimpleNamespace(kv_cache_spec=each) for each in specs or (spec(),)]
    layout = SimpleNamespace(kv_cache_groups=groups)
    return why_not_lean(
        **({"vllm_config": vllm_config, "kv_cache_config": layout, "block_size": 16} | more)
    )


def spec(of: type = FullAttentionSpec, **changes: Any) -> Any:
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    return of(**(shape | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"hash_block_size": 16}, None),
        ({"specs": (spec(), spec())}, "several kinds of KV cache"),
        ({"specs": (spec(SlidingWindowSpec, sliding_window=8),)}, "not that of full attention"),
        ({"specs": (spec(sliding_window=8),)}, "not that of full attention"),
        ({"specs": (spec(attention_chunk_size=8),)}, "not that of full attention"),
        ({"config": {"speculative_config": object()}}, "speculative decoding"),
        ({"config": {"kv_transfer_config": object()}}, "connector of the KV cache"),
        ({"config": {"ec_transfer_config": object()}}, "connector of an encoder"),
        (
            {"config": {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}},
            "events of the KV cache",
        ),
        (
            {"config": {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}},
            "pipeline or context parallelism",
        ),
        ({"hash_block_size": 4}, "parts of a block"),
        ({"log_stats": True}, "statistics"),
        ({"model": {"enable_return_routed_experts": True}}, "further outputs"),
        ({"model": {"return_sampling_mask": True}}, "further outputs"),
        ({"config": {"aux_output_config": SimpleNamespace(enabled=True)}}, "further outputs"),
        ({"model": {"runner_type": "pooling"}}, "does not generate"),
    ],
)
def test_whatever_could_differ_is_left_to_vllms_own_scheduler(changes: Any, reason: str | None):
    found = why_not(**changes)
    assert found is None if reason is None else found is not None and reason in found


def test_the_engine_says_once_that_vllms_own_scheduler_is_used(folder: str, caplog):
    caplog.set_level(logging.WARNING, lean_scheduler.logger.name)
    settings: dict[str, Any] = {"is_ahead": True, "blocks": 40, "block_size": 4}
    llm = start_without_model(
        folder, is_lean=True, max_model_len=MAX_MODEL_LEN, disable_log_stats=False, **settings
    )
    (record,) = [each for each in caplog.records if each.name == lean_scheduler.logger.name]
    assert "vLLM's own scheduler" in record.getMessage()
    assert "statistics are enabled" in record.getMessage()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler) is lean_scheduler.AsyncScheduler


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize("is_lean", [True, False])
def test_experts_of_preempted_requests_are_read_to_the_last_token_but_one(
    folder: str, is_lean: bool, is_ahead: bool
):
    """The stand-in for a store gives the experts of each position the position's number."""
    settings: dict[str, Any] = {"blocks": 30, "block_size": 4, "max_num_seqs": 8}
    llm = start_without_model(
        folder, is_lean=is_lean, is_ahead=is_ahead, max_model_len=100, **settings
    )
    inside = InsideVllm(llm)
    inside.record_experts(lambda blocks, first, end: np.arange(first, end)[:, None, None])
    llm.llm_engine.engine_core.engine_core.model_executor.sample = random_sample(3, range(4, 30))
    chance = np.random.default_rng(0)
    running: dict[str, tuple[SamplingRequest, Any, str]] = {}
    num_left, num_preempted = 300, 0

    def add(count: int) -> None:
        lengths = chance.integers((5, 10), (20, 60), (count, 2)).tolist()
        requests = [
            SamplingRequest(
                chance.integers(4, 30, length).astype(np.int32), most, 1.0, stop_token_ids=(7,)
            )
            for length, most in lengths
        ]
        names = inside.enqueue(
            list(map(vllm_prompt, requests)),
            list(map(sampling_params, requests)),
            [None] * count,
            chance.integers(0, 3, count).tolist(),
        )
        for request, name in zip(requests, names, strict=True):
            scheduled = inside.scheduled(name)
            scheduled.experts = []
            running[inside.state(name).external_req_id] = request, scheduled, name

    def check(request: SamplingRequest, scheduled: Any, flat: Any) -> None:
        tokens, log_probs = sampled(scheduled, flat)
        number = len(request.prompt_ids)
        done = completion_of(tokens, log_probs, "", [], scheduled.experts, number)
        if tokens:
            assert done.experts is not None
            assert done.experts.ravel().tolist() == list(range(number + len(tokens) - 1))

    add(8)
    while running:
        for output in inside.step():
            if output.finished:
                request, scheduled, _ = running.pop(output.request_id)
                num_preempted += scheduled.num_preemptions > 0
                check(request, scheduled, output.outputs[0].logprobs)
        if running and chance.random() < 0.02:
            request, scheduled, name = running.pop(str(chance.choice([*running])))
            flat = inside.state(name).logprobs_processor.logprobs
            inside.abort(name)
            check(request, scheduled, flat)
        while num_left and len(running) < 10:
            add(1)
            num_left -= 1
    assert num_preempted > 20
