"""vLLM's scheduler with less Python per sampled token; vLLM calls `create` (`scheduler_cls`).

vLLM (0.23 to 0.32) spends 20 us of its one thread on each sampled token, more than a GPU needs for
a small model. `_Lean` saves two thirds of that. All decisions of vLLM's scheduler, all tokens and
all log-probs stay the same:

- A token that neither begins nor ends a response is appended here. All other tokens go through
  vLLM's own `update_from_output`, in vLLM's order, because the order decides which block of the KV
  cache a later prompt reuses.
- Log-probs go from the model runner's array into an array of each request (`Request.log_probs`).
- vLLM's output processor gets a request once, with all tokens, when it has ended. Requests with
  stop strings pass it at each step, because it matches the strings.
- `allocate_slots` returns at once if vLLM's own would allocate and cache nothing.
"""

from __future__ import annotations

import logging
import math
from array import array
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

_ATTRIBUTES = Request.__init__.__code__.co_names
COUNTS_IN_FLIGHT = "num_in_flight_tokens" in _ATTRIBUTES  # since 0.26
STALE = next(  # the second until 0.26
    name for name in ("num_stale_output_tokens", "async_tokens_to_discard") if name in _ATTRIBUTES
)
"""Count of a request's tokens in flight that were sampled before its preemption."""
RUNNING = RequestStatus.RUNNING

logger = logging.getLogger(__name__)


def create(**arguments: Any) -> Scheduler:
    """Create vLLM's usual scheduler, as its lean subclass if that is equivalent.

    Args:
        arguments: Arguments of vLLM's `Scheduler`.
    """
    is_async = arguments["vllm_config"].scheduler_config.async_scheduling
    if (reason := why_not_lean(**arguments)) is not None:
        logger.warning(
            "The engine uses vLLM's own scheduler, which takes more CPU time per token: %s.", reason
        )
        if arguments["vllm_config"].speculative_config is not None:
            return (SpeculativeAsyncScheduler if is_async else SpeculativeScheduler)(**arguments)
        return (AsyncScheduler if is_async else Scheduler)(**arguments)
    return (LeanAsyncScheduler if is_async else LeanScheduler)(**arguments)


def why_not_lean(
    *,
    vllm_config: Any,
    kv_cache_config: Any,
    block_size: int,
    hash_block_size: int | None = None,
    log_stats: bool = False,
    **_: Any,
) -> str | None:
    """Return why `Lean` could differ from vLLM's scheduler, or None if it cannot.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's layout of the KV cache.
        block_size: Tokens in a block of the KV cache.
        hash_block_size: Tokens under one hash of the prefix cache. None means `block_size`.
        log_stats: Whether vLLM's statistics need the outputs of each step.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    events, aux_outputs = (
        vllm_config.kv_events_config,
        getattr(vllm_config, "aux_output_config", None),
    )
    reasons = {
        "the model's layers need several kinds of KV cache": len(specs) != 1,
        "the model's KV cache is not that of full attention": any(
            type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size
            for spec in specs
        ),
        "speculative decoding is enabled": vllm_config.speculative_config is not None,
        "a connector of the KV cache is enabled": vllm_config.kv_transfer_config is not None,
        "a connector of an encoder is enabled": vllm_config.ec_transfer_config is not None,
        "events of the KV cache are enabled": events is not None and events.enable_kv_cache_events,
        "pipeline or context parallelism is enabled": (
            parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1
        ),
        "the prefix cache has hashes of parts of a block": hash_block_size
        not in (None, block_size),
        "vLLM's statistics are enabled": log_stats,
        "further outputs of the model are enabled": (
            getattr(model, "enable_return_routed_experts", False)  # until 0.30
            or getattr(model, "return_sampling_mask", False)  # since 0.28
            or (aux_outputs is not None and aux_outputs.enabled)  # since 0.31
        ),
        "the model does not generate text": model.runner_type != "generate",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class _Lean(Scheduler if TYPE_CHECKING else object):
    """Mixin for vLLM's schedulers, valid if `why_not_lean` returns None."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_async = isinstance(self, AsyncScheduler)
        manager: Any = self.kv_cache_manager
        (self._blocks,) = manager.coordinator.single_type_managers
        self._usual_allocate_slots = manager.allocate_slots
        manager.allocate_slots = self._allocate_slots

    def add_request(self, request: Any) -> None:
        """Add a request, and what `update_from_output` and `inside_vllm.sampled` read of it."""
        params = request.sampling_params
        request.log_probs = array("f")
        request.end_ids = frozenset((*(params.stop_token_ids or ()), params.eos_token_id))
        # vLLM ends a response at `max_tokens`, and a sequence at `max_model_len`.
        request.max_length = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
        request.is_plain = not (
            params.stop
            or params.repetition_detection is not None
            or request.structured_output_request is not None
            or request.mm_features
            or request.resumable
        )
        super().add_request(request)

    def _allocate_slots(self, request: Request, num_new_tokens: int, **more: Any) -> Any:
        """Allocate like vLLM's method, which does nothing for most decode tokens."""
        if num_new_tokens == 1 and request.status is RUNNING:
            blocks, name, computed = self._blocks, request.request_id, request.num_computed_tokens
            if len(blocks.req_to_blocks[name]) * blocks.block_size > computed and (
                not blocks.enable_caching
                or blocks.num_cached_block.get(name, 0)
                >= min(computed + 1, request.num_tokens) // blocks.block_size
            ):
                return self.kv_cache_manager.empty_kv_cache_blocks
        return self._usual_allocate_slots(request, num_new_tokens, **more)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Append a step's tokens to their requests; return outputs of requests that have ended."""
        sampled, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        log_probs, model_runner_output.logprobs = model_runner_output.logprobs, None
        if log_probs is None:  # nothing was sampled, or nobody asked for log-probs
            values = [math.nan] * len(rows)
        else:
            assert log_probs.cu_num_generated_tokens is None, "there is no speculation"
            values = log_probs.logprobs[:, 0].tolist()  # the first column is the sampled token's
        outputs: dict[int, Any] = {}
        others: dict[str, int] = {}  # neighbours that vLLM's own method has to process
        requests, size = self.requests, self.block_size
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request: Any = requests.get(name)
            tokens = sampled[rows[name]] if sampled else ()
            if (
                request is None
                or not tokens
                or not request.is_plain
                or request.status is not RUNNING
                or getattr(request, STALE)
                or tokens[0] in request.end_ids
                or not 0 < len(request._output_token_ids) < request.max_length - 1
            ):
                others[name] = count
                continue
            if others:
                self._update_others(outputs, others, values, scheduler_output, model_runner_output)
                others = {}
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            request.log_probs.append(values[rows[name]])
            if not len(request._all_token_ids) % size:
                request.update_block_hashes()
            if COUNTS_IN_FLIGHT:
                request.num_in_flight_tokens -= count
            if self._is_async:
                request.num_output_placeholders -= 1
                computed = request.num_computed_tokens - request.num_output_placeholders
                if self._blocks.num_cached_block.get(name, 0) < computed // size:
                    self.kv_cache_manager.cache_blocks(request, computed)
        if others:
            self._update_others(outputs, others, values, scheduler_output, model_runner_output)
        return outputs

    def _update_others(
        self,
        outputs: dict[int, Any],
        counts: dict[str, int],
        values: list[float],
        scheduler_output: Any,
        model_runner_output: Any,
    ) -> None:
        """Update some requests by vLLM's own method; add its outputs to `outputs`."""
        requests: dict[str, Any] = {
            name: self.requests[name] for name in counts if name in self.requests
        }
        lengths = [len(request._output_token_ids) for request in requests.values()]
        part = copy(scheduler_output)
        part.num_scheduled_tokens = counts
        parts = super().update_from_output(part, model_runner_output)
        for (name, request), length in zip(requests.items(), lengths, strict=True):
            if len(request._output_token_ids) > length:
                request.log_probs.append(values[model_runner_output.req_id_to_index[name]])
        for client, output in parts.items():
            kept = []
            for each in output.outputs:
                request = requests.get(each.request_id)
                if request is not None and not request.sampling_params.stop:
                    if each.finish_reason is None:
                        continue
                    each.new_token_ids = list(request._output_token_ids)
                kept.append(each)
            if client in outputs:
                outputs[client].outputs += kept
            else:
                output.outputs = kept
                outputs[client] = output


class LeanScheduler(_Lean, Scheduler):
    """Lean subclass of vLLM's synchronous scheduler, as on CPU."""


class LeanAsyncScheduler(_Lean, AsyncScheduler):
    """Lean subclass of vLLM's asynchronous scheduler, as on GPUs."""


class _CountsDrafts(Scheduler if TYPE_CHECKING else object):
    """Mixin for vLLM's schedulers with speculative decoding."""

    drafts: tuple[int, int] = (0, 0)
    """Number of drafted tokens, and of those that the policy accepted, since the start."""

    def make_spec_decoding_stats(
        self, *stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any
    ) -> Any:
        """Count a request's drafted tokens of a step; vLLM counts them if it logs statistics."""
        drafted, accepted = self.drafts
        self.drafts = drafted + num_draft_tokens, accepted + num_accepted_tokens
        return super().make_spec_decoding_stats(
            *stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            **more,
        )


class SpeculativeScheduler(_CountsDrafts, Scheduler):
    """vLLM's synchronous scheduler, as on CPU, which counts drafted tokens."""


class SpeculativeAsyncScheduler(_CountsDrafts, AsyncScheduler):
    """vLLM's asynchronous scheduler, as on GPUs, which counts drafted tokens."""
