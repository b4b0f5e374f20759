"""What is asked of the inside of a vLLM: every name that it does not promise to keep, but those of
its workers (`worker_extension.py`).

A test reads the installed sources for each of them, so that a new version shows itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class InsideVllm:
    """A `vllm.LLM` whose scheduler is in this process, and what it knows of its requests."""

    llm: Any

    @property
    def most_running(self) -> int:
        """Requests that it samples at a time."""
        return self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs

    @property
    def kv_cache_use(self) -> float:
        """Share of the KV cache that is in use, 0 to 1."""
        return self._scheduler.kv_cache_manager.usage

    def enqueue(
        self,
        prompts: Sequence[np.ndarray],
        params: Sequence[Any],
        adapters: Sequence[Any | None],
        priorities: Sequence[int],
        salts: Sequence[str],
    ) -> list[str]:
        """Take requests in; what vLLM calls each.

        Args:
            prompts: int [P] each.
            params: `vllm.SamplingParams` of each.
            adapters: `LoRARequest` of each, if any.
            priorities: Of each; lower is sampled sooner.
            salts: Of each; what is cached under another one is not used.
        """
        return self.llm.enqueue(
            [
                {"prompt_token_ids": ids.tolist(), **({"cache_salt": salt} if salt else {})}
                for ids, salt in zip(prompts, salts, strict=True)
            ],
            params,
            lora_request=adapters,
            priority=priorities,
            use_tqdm=False,
        )

    def step(self) -> list[Any]:
        """One forward pass; its `RequestOutput`s."""
        return self.llm.llm_engine.step()

    def abort(self, name: str) -> None:
        """Forget a request."""
        self.llm.llm_engine.abort_request([name], internal=True)

    def state(self, name: str) -> Any:
        """What vLLM holds of a running request: its tokens (`detokenizer`), their log-probs
        (`logprobs_processor`), and the name that outputs have (`external_req_id`)."""
        return self.llm.llm_engine.output_processor.request_states[name]

    def scheduled(self, name: str) -> Any:
        """What the scheduler has of a request: its `num_preemptions`, also when it has ended."""
        return self._scheduler.requests[name]

    def settle(self, step: Callable[[], bool]) -> None:
        """Take what it has sampled ahead of its outputs, and sample no more meanwhile.

        Args:
            step: A step; whether to go on.
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

    def forget_keys(self, *, of_running: bool = False) -> bool:
        """Let go of all keys and values; whether it did.

        Args:
            of_running: Also of what runs, whose keys and values are then computed again. vLLM
                counts that as a preemption of each.
        """
        return self.llm.reset_prefix_cache(reset_running_requests=of_running)

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def _scheduler(self) -> Any:
        return self._core.scheduler
