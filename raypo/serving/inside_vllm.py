"""Access to vLLM's internals, except those of its workers (`vllm_processes.py`).

All names here are outside vLLM's stable API. A test looks up each of them in the installed sources,
and fails if a version lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def sampled(scheduled: Any, flat: Any) -> tuple[Sequence[int], Sequence[float]]:
    """Return a request's tokens so far and their log-probs.

    Args:
        scheduled: The scheduler's object of the request. It has the log-probs if the scheduler is
            raypo's (`lean_scheduler`).
        flat: The `FlatLogprobs` of the request's output processor.
    """
    if (log_probs := getattr(scheduled, "log_probs", None)) is not None:
        return scheduled._output_token_ids, log_probs
    return flat.token_ids, flat.logprobs


@dataclass(frozen=True)
class InsideVllm:
    """Wrapper of a `vllm.LLM` whose scheduler runs in this process."""

    llm: Any

    @property
    def max_running(self) -> int:
        """Maximum number of requests in a step (`max_num_seqs`)."""
        return self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    @property
    def vocabulary_size(self) -> int:
        """Size of the vocabulary, including padding."""
        return self.llm.llm_engine.model_config.get_vocab_size()

    @property
    def num_workers(self) -> int:
        """Number of workers, one for each device."""
        return self.llm.llm_engine.vllm_config.parallel_config.world_size

    @property
    def has_sleep_mode(self) -> bool:
        """True if vLLM was started with `enable_sleep_mode`."""
        return self.llm.llm_engine.model_config.enable_sleep_mode

    @property
    def speculates(self) -> bool:
        """True if vLLM was started with speculative decoding."""
        return self.llm.llm_engine.vllm_config.speculative_config is not None

    @property
    def drafts(self) -> tuple[int, int]:
        """Number of drafted tokens, and of those that the policy accepted, since the start."""
        return getattr(self._scheduler, "drafts", (0, 0))

    @property
    def has_lost_a_process(self) -> bool:
        """True if the process of a worker has ended."""
        return getattr(self.llm.llm_engine.model_executor, "is_failed", False)

    @property
    def has_unfinished_requests(self) -> bool:
        """True if vLLM holds requests that it has not ended."""
        return self.llm.llm_engine.has_unfinished_requests()

    @property
    def kv_cache_use(self) -> float:
        """Share of the KV cache that is in use, 0 to 1."""
        return self._scheduler.kv_cache_manager.usage

    def enqueue(
        self,
        prompts: Sequence[dict[str, Any]],
        params: Sequence[Any],
        adapters: Sequence[Any | None],
        priorities: Sequence[int],
    ) -> list[str]:
        """Add requests to vLLM's scheduler; all arguments have one entry for each request.

        Args:
            prompts: vLLM's `TokensPrompt`s.
            params: `vllm.SamplingParams`.
            adapters: `LoRARequest`, or None.
            priorities: Lower is scheduled sooner.

        Returns:
            vLLM's internal id of each request.
        """
        return self.llm.enqueue(
            prompts,
            params,
            lora_request=adapters,
            priority=priorities,
            use_tqdm=False,
        )

    def step(self) -> list[Any]:
        """Run one engine step and return its `RequestOutput`s."""
        return self.llm.llm_engine.step()

    def before_each_step(self, call: Callable[[], None]) -> None:
        """Call a function before each step, also in `LLM.generate` and `LLM.encode`."""
        step = self.llm.llm_engine.step

        def call_and_step() -> Any:
            call()
            return step()

        self.llm.llm_engine.step = call_and_step

    def shutdown(self) -> None:
        """Free memory and vLLM's globals."""
        self.llm.llm_engine.engine_core.shutdown()

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.llm.llm_engine.abort_request([name], internal=True)

    def state(self, name: str) -> Any:
        """Return the output processor's state of a running request.

        It holds the log-probs that `sampled` reads and the request's external id
        (`external_req_id`).
        """
        return self.llm.llm_engine.output_processor.request_states[name]

    def scheduled(self, name: str) -> Any:
        """Return the scheduler's object of a request, for its tokens and `num_preemptions`."""
        return self._scheduler.requests[name]

    def record_experts(self, read: Callable[[list[int], int, int], np.ndarray]) -> None:
        """Record the experts of a request's tokens when its blocks of the KV cache are freed.

        They are freed when the request ends, when vLLM preempts it, and when a push lets it
        recompute its keys and values. A token that was recorded keeps its experts, although it
        is then read again, perhaps by new weights.

        Args:
            read: Function `(blocks, first, end)` that returns the experts of tokens `first` to
                `end` of the request that has these blocks.
        """
        manager = self._scheduler.kv_cache_manager
        free = manager.free

        def read_and_free(request: Any) -> None:
            parts: list[np.ndarray] | None = getattr(request, "experts", None)
            if parts is not None:
                recorded = sum(map(len, parts))
                # Steps in flight write before the store is read, also those whose tokens vLLM has
                # not delivered yet (`num_computed_tokens` counts them).
                computed = min(request.num_computed_tokens, request.num_tokens)
                if computed > recorded:
                    (blocks,) = manager.get_block_ids(request.request_id)
                    parts.append(read(blocks, recorded, computed))
            free(request)

        manager.free = read_and_free

    def drain_steps(self, step: Callable[[], bool]) -> None:
        """Drain the batches in flight under asynchronous scheduling; schedule no new ones.

        Args:
            step: Function that runs one engine step. It returns False to stop.
        """
        if not getattr(self._core, "batch_queue", None):
            return
        from vllm.v1.core.sched.interface import PauseState

        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue and step():
                pass
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def reset_kv_cache(self, *, include_running: bool = False) -> bool:
        """Reset the prefix cache; return False if vLLM could not.

        Args:
            include_running: Also drop the keys and values of running requests, which are then
                recomputed. vLLM counts that as a preemption of each request.
        """
        return self.llm.reset_prefix_cache(reset_running_requests=include_running)

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler
