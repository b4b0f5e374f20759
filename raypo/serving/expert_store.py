"""Store of the experts that vLLM chose for each token, beside the KV cache of a vLLM worker.

An entry belongs to a slot of the KV cache. It is written in the pass that computes the slot's keys
and values. So every token has an entry, even in a prefix computed for another request. Blocks
reused by the prefix cache keep theirs. A request's entries are read just before its blocks are
freed: when it ends, and when vLLM preempts it (`InsideVllm`).

L layers with experts, k experts of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypo.weights.manifest import WeightError


class ExpertStore:
    """Experts of each slot of the KV cache, [slots, L, k]."""

    def __init__(self, model_runner: Any) -> None:
        """Allocate the store and begin to record.

        Args:
            model_runner: vLLM's model runner, after it has allocated its KV cache. It must run
                without CUDA graphs, because replaying a graph skips the recording callback.

        Raises:
            WeightError: the experts of the model cannot be recorded.
        """
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        cache = model_runner.kv_cache_config
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        layers = [m for m in model_runner.get_model().modules() if isinstance(m, MoERunner)]
        is_full = len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)
        if not is_full or specs[0].sliding_window or specs[0].attention_chunk_size:
            raise _cannot("some layers do not keep keys and values of all tokens")
        if not layers:
            raise _cannot("vLLM finds no MoE layers in it")
        for layer in layers:
            if not isinstance(layer.router, BaseRouter):
                raise _cannot(f"vLLM's {type(layer.router).__name__} does not report its choice")
            if layer.routed_experts.quant_method.is_monolithic:
                raise _cannot("the experts are chosen inside the kernel that computes them")
        self._block_size = specs[0].block_size
        routers: list[Any] = [
            layer.router for layer in sorted(layers, key=lambda layer: layer.layer_id)
        ]
        most = max(router.global_num_experts for router in routers)
        self._entries = torch.zeros(
            (cache.num_blocks * self._block_size + 1, len(routers), routers[0].top_k),
            dtype=torch.uint8 if most <= 256 else torch.int16,
            device=model_runner.device,
        )
        """The last entry absorbs padding (slot -1)."""
        for number, router in enumerate(routers):
            router.set_capture_fn(partial(self._write, number))

    def _write(self, layer: int, experts: Tensor) -> None:
        """Store the experts [N, k] that one layer chose in a pass."""
        from vllm.forward_context import get_forward_context

        by_layer = get_forward_context().slot_mapping
        assert isinstance(by_layer, dict), "microbatched passes are not supported"
        if by_layer:  # else the pass only measures memory
            slots = next(iter(by_layer.values()))
            assert len(slots) == len(experts), "this worker routed only some tokens"
            self._entries[slots, layer] = experts.to(self._entries.dtype)

    def read(self, blocks: list[int], first: int, end: int) -> np.ndarray:
        """Return the experts of a request's tokens `first` to `end`, [end - first, L, k].

        Args:
            blocks: The request's blocks of the KV cache.
            first: Position of the first token in the request.
            end: Position after the last token.
        """
        positions = np.arange(first, end)
        numbers = np.asarray(blocks)[positions // self._block_size]
        slots = numbers * self._block_size + positions % self._block_size
        return self._entries[torch.from_numpy(slots).to(self._entries.device)].cpu().numpy()


def _cannot(reason: str) -> WeightError:
    return WeightError(
        f"rollout.router_replay (engine): the engine cannot record this model's experts: {reason}. "
        "Set rollout.router_replay to off."
    )
