"""Parameters that ZeRO-3 has sharded, and gathering them in models without a DeepSpeed engine.

DeepSpeed's `zero.Init` replaces a parameter's data by an empty tensor, and adds attributes whose
names begin with `ds_` and the methods `all_gather` and `partition`. Only this module uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations import deepspeed as integration

from raypo.collectives import Workers


class OtherWorkerError(RuntimeError):
    """Error that another learner worker has raised."""


def is_sharded(parameter: Tensor) -> bool:
    """Return True if ZeRO-3 has sharded a parameter."""
    return hasattr(parameter, "ds_id")


def has_shards(model: nn.Module) -> bool:
    """Return True if ZeRO-3 has sharded a parameter of the model."""
    return any(map(is_sharded, model.parameters()))


def workers_of_shards(model: nn.Module) -> Workers:
    """Return the workers that hold a model's shards. A model without shards has one worker."""
    sharded: Any = next(filter(is_sharded, model.parameters()), None)
    if sharded is None:
        return Workers()
    group = sharded.ds_process_group
    return Workers(dist.get_rank(group), dist.get_world_size(group), group)


def own_shard(parameter: Tensor) -> Tensor:
    """Return this worker's shard of a sharded parameter, flattened and padded."""
    return parameter.ds_tensor  # type: ignore[attr-defined]


def whole_numel(tensor: Tensor) -> int:
    """Return the number of elements of a tensor, once it is gathered."""
    return getattr(tensor, "ds_numel", tensor.numel())


def whole_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, once it is gathered."""
    return whole_numel(tensor) * tensor.element_size()


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor, once it is gathered."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Gather a module's own weights, not its children's, for reading. A collective operation."""
    sharded: list[Any] = [*filter(is_sharded, module.parameters(recurse=False))]
    if sharded:
        sharded[0].all_gather(sharded)
    try:
        yield
    finally:
        if sharded:
            sharded[0].partition(sharded)


@contextmanager
def without_shards() -> Iterator[None]:
    """Build networks as if ZeRO-3 were off, for example on the meta device.

    transformers would otherwise gather and initialise the weights of each network that it builds.
    """
    reference: Any = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if reference is not None and (config := reference()) is not None:
            integration.set_hf_deepspeed_config(config)


@contextmanager
def whole_as_it_computes(model: nn.Module) -> Iterator[None]:
    """Gather each module's weights during its forward pass. A collective operation.

    An error on one worker is raised on all of them. Otherwise the others would wait for that worker
    in NCCL for half an hour. A model without shards is not affected.

    Raises:
        OtherWorkerError: another worker failed.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield
        return
    workers, gathered = Workers.current(), dict[nn.Module, Any]()

    def gather(module: nn.Module, _: Any) -> None:
        _raise_together(workers)
        gathered[module] = whole(module)
        gathered[module].__enter__()

    def partition(module: nn.Module, *_: Any) -> None:
        if module in gathered:
            gathered.pop(module).__exit__(None, None, None)

    hooks: list[Any] = []
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(gather))
            hooks.append(module.register_forward_hook(partition, always_call=True))
    try:
        yield
        _raise_together(workers)
    except OtherWorkerError:
        raise
    except Exception as error:
        _raise_together(workers, f"{type(error).__name__}: {error}")
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _raise_together(workers: Workers, failure: str | None = None) -> None:
    """Raise on all workers except those with a failure, if there is one."""
    for rank, message in enumerate(workers.gather(failure)):
        if message and not failure:
            raise OtherWorkerError(f"learner worker {rank}: {message}")
