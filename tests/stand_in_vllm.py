"""A stand-in for vLLM in one process: thousands of steps in a second, and no import of vLLM."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from raypo.serving import engine, vllm_loop
from raypo.serving.requests import SamplingRequest
from raypo.serving.vllm_processes import Answer
from raypo.weights.buckets import Bucket, unpack
from raypo.weights.manifest import TensorSpec, WeightError
from raypo.weights.messages import Ready


class Pause(IntEnum):
    UNPAUSED, PAUSED_ALL = 0, 2


class Request:
    """A request of the stand-in's scheduler and output processor, whose tokens are 0, 1, 2, ...

    The log-prob of each is its number, and the weight that sampled it, below zero.
    """

    def __init__(self, name: str, length: int) -> None:
        self.num_preemptions = 0
        self.external_req_id, self.length = name, length
        self._output_token_ids: list[int] = []
        self.log_probs = array("f")
        self.logprobs_processor = SimpleNamespace(logprobs=None)

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    def sample(self, weight: float) -> None:
        number = self.num_output_tokens
        self._output_token_ids.append(number)
        self.log_probs.append(-number - weight)


class KvCache:
    """A cache with room for a hundred requests."""

    def __init__(self, requests: dict[str, Request]) -> None:
        self._requests = requests

    @property
    def usage(self) -> float:
        return len(self._requests) / 100


class StandIn:
    """A `vllm.LLM` with one worker; every call fails in another thread than the first.

    Its model is one number: the sum of the embedding.
    """

    def __init__(self, *, ahead: bool = False, max_num_seqs: int = 3, step_s: float = 0.0) -> None:
        self.step_s, self.weight = step_s, 0.0
        self.arriving: dict[str, Tensor] = {}
        self.numbers = itertools.count()
        self.requests: dict[str, Request] = {}
        self.entered: list[list[str]] = []
        self.thread = threading.current_thread()
        self.ahead = ahead
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
            parallel_config=SimpleNamespace(world_size=1),
            speculative_config=None,
        )
        self.scheduler = SimpleNamespace(
            requests={},
            kv_cache_manager=KvCache(self.requests),
            set_pause_state=lambda state: setattr(self, "pause", state),
        )
        self.core = SimpleNamespace(scheduler=self.scheduler, batch_queue=[] if ahead else None)
        self.pause = Pause.UNPAUSED
        self.llm_engine = SimpleNamespace(
            vllm_config=config,
            output_processor=SimpleNamespace(request_states=self.requests),
            engine_core=SimpleNamespace(engine_core=self.core, shutdown=lambda: None),
            model_config=SimpleNamespace(enable_sleep_mode=False, get_vocab_size=lambda: 100),
            model_executor=None,
            has_unfinished_requests=lambda: bool(self.requests),
            step=self.step,
            abort_request=self.abort_request,
        )

    def enqueue(self, prompts: list, params: list[SamplingRequest], **_: Any) -> list[str]:
        assert threading.current_thread() is self.thread
        names = [str(next(self.numbers)) for _ in prompts]
        self.entered.append(names)
        for name, request in zip(names, params, strict=True):
            self.requests[f"{name}-x"] = Request(name, request.max_new_tokens)
            self.scheduler.requests[f"{name}-x"] = self.requests[f"{name}-x"]
        return [f"{name}-x" for name in names]

    def step(self) -> list[Any]:
        """A token of each; where vLLM is ahead, of those that were there one step before."""
        assert threading.current_thread() is self.thread
        time.sleep(self.step_s)
        batch = [] if self.pause is Pause.PAUSED_ALL else list(self.requests)
        if self.ahead:
            self.core.batch_queue.insert(0, batch)
            if len(self.core.batch_queue) < 2 and self.pause is Pause.UNPAUSED:
                return []
            batch = self.core.batch_queue.pop()
            self.core.batch_queue = [each for each in self.core.batch_queue if each]
        finished = []
        for name in batch:
            if name in self.requests:
                request = self.requests[name]
                request.sample(self.weight)
                if request.num_output_tokens == request.length:
                    self.forget(name)
                    said = SimpleNamespace(logprobs=None, finish_reason="length")
                    output = SimpleNamespace(
                        finished=True, request_id=request.external_req_id, outputs=[said]
                    )
                    finished.append(output)
        return finished

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert threading.current_thread() is self.thread
        assert internal
        for name in names:
            self.forget(name)

    def forget(self, name: str) -> None:
        del self.requests[name], self.scheduler.requests[name]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            self.preempt_all()
        return reset_running_requests or not self.requests

    def preempt_all(self) -> None:
        for request in self.requests.values():
            request.num_preemptions += 1

    def collective_rpc(self, name: str, args: tuple[Any, ...]) -> list[Answer]:
        assert name == "raypo_answer"
        method, *arguments = args
        try:
            return [Answer(getattr(self, method)(*arguments))]
        except WeightError as error:
            return [Answer(failure=error)]

    def raypo_begin_push(self) -> Ready:
        self.arriving.clear()
        return Ready(1, None)

    def raypo_load_bucket(
        self, bucket: Bucket, second_names: list[str], conversions: Any
    ) -> list[TensorSpec]:
        self.arriving |= dict(unpack(bucket, verify=True))
        return list(bucket.specs)

    def raypo_finish_push(self) -> None:
        self.weight = weight_of(self.arriving)


def weight_of(tensors: Mapping[str, Tensor]) -> float:
    return float(tensors["model.embed_tokens.weight"].detach().sum())


@contextmanager
def in_place_of_vllm(**options: Any) -> Iterator[None]:
    """Make engines start a stand-in."""

    def start(arguments: dict[str, Any], num_threads: int) -> StandIn:
        return StandIn(max_num_seqs=arguments["max_num_seqs"], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "start_llm", start)
        patch.setattr(vllm_loop, "sampling_params", lambda request, placeholder_id: request)
        interface = SimpleNamespace(PauseState=Pause)
        patch.setitem(sys.modules, "vllm.v1.core.sched.interface", interface)
        yield
