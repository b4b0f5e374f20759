"""Uses of DeepSpeed's internals, which no other module touches.

`tests/unit/learner/test_deepspeed_internals.py` fails if a new version of DeepSpeed has changed one
of them. The attributes of sharded parameters, which models without DeepSpeed read too, are in
`raypo.models.shares`.

An `engine` is a `DeepSpeedEngine`. Its `optimizer` depends on the ZeRO stage and the dtype:
DeepSpeed's for stage 1 or 2, its for stage 3, `BF16_Optimizer` (stage 1 in bfloat16), or at stage 0
torch's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raypo.collectives import Workers
from raypo.learner.sharded_state import Fragment, Moment
from raypo.models.checkpoint import stored_tensors
from raypo.models.shares import is_sharded, whole_numel


def import_deepspeed() -> Any:
    """Import DeepSpeed; on CPU without its shared-memory op.

    That op is only for inference, and DeepSpeed would compile it for 40 s at the first start.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    if not torch.cuda.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def compare_within(group: Any) -> None:
    """Make DeepSpeed compare the order of modules only within a worker's own team.

    At stage 3 DeepSpeed (0.19) records the order in which a model runs its modules, and checks that
    all workers of the default group have the same order. Policy and critic have different orders,
    so this check fails if separate workers train them.
    """
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    def assert_same(order: list[int]) -> None:
        orders: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(orders, order, group=group)
        if any(other != order for other in orders):
            raise RuntimeError(
                f"workers run the modules of one model in different orders: {orders}"
            )

    coordinator.assert_ints_same_as_other_ranks = assert_same


@contextmanager
def exact_buffers() -> Iterator[None]:
    """Let models that transformers creates in shards keep the precision of their buffers.

    DeepSpeed's `zero.Init` rounds every tensor that a model creates. In bfloat16, rotary
    frequencies are then off by up to 0.2 %, and after 1,000 tokens the angles differ from those of
    an engine. Inside this context it rounds only parameters.
    """
    zero = import_deepspeed().zero

    class Init(zero.Init):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            overrides = [zero.DeepSpeedTensorOverride.device]
            super().__init__(*args, tensor_overrides=overrides, **kwargs)

        def _post_init_method(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                if not is_sharded(parameter) and parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.dtype)
            super()._post_init_method(module)

    own_init, zero.Init = zero.Init, Init
    try:
        yield
    finally:
        zero.Init = own_init


def mark_for_muon(parameter: nn.Parameter, *, is_muon: bool) -> None:
    """Set the mark by which DeepSpeed's optimizers of ZeRO stages 1 to 3 know Muon's parameters."""
    parameter.use_muon = is_muon  # type: ignore[attr-defined]


def new_muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return DeepSpeed's Muon, with torch's fused AdamW for the groups without `use_muon`."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam(
        groups,
        adam_optimizer=torch.optim.AdamW,
        adam_optimizer_kwargs={"lr": 0.0, "fused": True},
    )


def leave_out_reduction(engine: Any) -> None:
    """Let a single worker reduce no gradients, which saves a copy of them.

    An optimizer with buckets reduces gradients itself and is not changed.
    """
    if not hasattr(engine.optimizer, "ipg_buckets"):
        engine.enable_backward_allreduce = False


def publish_masters(engine: Any) -> None:
    """Copy the float32 master weights into the model after they were loaded from a checkpoint."""
    zero, stage = engine.optimizer, int(engine.zero_optimization_stage())
    if stage == 3:
        zero.checkpoint_event_prologue()  # shards gathered parameters
        for group in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        zero.checkpoint_event_epilogue()  # gathers small parameters again
    elif stage > 0:
        zero.update_lp_params()


def fragments(engine: Any, optimizer: torch.optim.Optimizer, workers: Workers) -> list[Fragment]:
    """Return the fragments of the trained parameters that this worker holds, and all buffers.

    Args:
        engine: A DeepSpeedEngine.
        optimizer: The torch optimizer that it steps.
        workers: The workers that train the model.
    """
    return [*_trained_fragments(engine, optimizer, workers), *_buffers(engine.module)]


def _trained_fragments(
    engine: Any, optimizer: torch.optim.Optimizer, workers: Workers
) -> Iterator[Fragment]:
    zero = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_muon = getattr(parameter, "use_muon", False)
        if is_sharded(parameter):  # stage 3; the last worker's part may end with padding
            group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
            numel, start = whole_numel(parameter), workers.rank * share
            if (size := min(share, numel - start)) > 0:
                owner = zero.fp32_partitioned_groups_flat[group]
                fragment = Fragment(name, numel, start, size, owner, offset, is_muon=is_muon)
                if is_muon:  # Muon's moments have the data type of communicated gradients
                    moment = replace(fragment.of_moment, dtype=zero.communication_data_type)
                    fragment = replace(fragment, moment=moment)
                yield fragment
        elif hasattr(parameter, "_hp_mapping"):  # stages 1 and 2, and BF16_Optimizer
            if (part := parameter._hp_mapping) is not None:
                (owner,) = optimizer.param_groups[part.param_group_index]["params"]
                low, high = part.lp_fragment_address, part.hp_fragment_address
                yield Fragment(
                    name,
                    parameter.numel(),
                    low.start,
                    low.numel,
                    owner,
                    high.start,
                    is_muon=is_muon,
                    moment=_whole_moment(zero, part.param_group_index, parameter, owner.dtype)
                    if is_muon
                    else None,
                )
        else:
            numel = parameter.numel()
            yield Fragment(
                name, numel, 0, numel, parameter, is_on_every_worker=True, is_muon=is_muon
            )


def _buffers(module: nn.Module) -> Iterator[Fragment]:
    """Yield the buffers of the model's files, which a pass may change."""
    for name, tensor in stored_tensors(module):
        if not isinstance(tensor, nn.Parameter):
            numel = tensor.numel()
            yield Fragment(name, numel, 0, numel, tensor, is_on_every_worker=True)


def _whole_moment(zero: Any, group: int, parameter: Tensor, dtype: torch.dtype) -> Moment | None:
    """Return the layout of Muon's moments at ZeRO stages 1 and 2, or None for BF16_Optimizer."""
    parameters = vars(zero).get("params_in_partition")
    if parameters is None:
        return None
    offset = total = 0
    for other in parameters[group]:
        offset = total if other is parameter else offset
        total += other.numel()
    return Moment(0, parameter.numel(), offset, (total,), dtype)


def is_accumulating(engine: Any) -> bool:
    """Return True if gradients of the next step have been accumulated."""
    return engine._unmanaged_backward_count > 0


def flat_masters(engine: Any) -> Iterable[Tensor]:
    """Return the flat float32 master weights of stage 3, which are in no parameter group."""
    return vars(engine.optimizer).get("fp32_partitioned_groups_flat", ())


def gradient_sums(engine: Any) -> Iterator[Tensor]:
    """Yield the float32 sums of gradients, which stay allocated between two steps."""
    zero = vars(engine.optimizer)
    yield from zero.get("fp32_groups_gradients_flat", ())  # BF16_Optimizer
    if (sums := zero.get("grad_partitions_flat_buffer")) is not None:  # stage 3
        yield sums


def reduction_buckets(engine: Any) -> Iterator[Tensor]:
    """Yield the buffers in which gradients are summed over the workers.

    Only stage 3 keeps them allocated between steps.
    """
    for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values():
        if isinstance(bucket.buffer, Tensor):
            yield bucket.buffer
