"""Models that ZeRO-3 has cut into shares, before an engine of DeepSpeed looks after them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """A module's own weights whole for reading; all workers together.

    `all_gather` and `partition` are what DeepSpeed's `zero.Init` gives each weight.
    """
    own: list[Any] = [p for p in module.parameters(recurse=False) if hasattr(p, "ds_id")]
    if own:
        own[0].all_gather(own)
    try:
        yield
    finally:
        if own:
            own[0].partition(own)


@contextmanager
def whole_as_it_computes(model: nn.Module) -> Iterator[None]:
    """Each module has its own weights whole while it computes; all workers compute together.

    A model that nobody has cut computes as ever.
    """
    open_ones: list[Any] = []
    hooks: list[Any] = []

    def gather(module: nn.Module, _: Any) -> None:
        open_ones.append(whole(module))
        open_ones[-1].__enter__()

    def partition(*_: Any) -> None:
        open_ones.pop().__exit__(None, None, None)

    for module in model.modules():
        if any(hasattr(each, "ds_id") for each in module.parameters(recurse=False)):
            hooks.append(module.register_forward_pre_hook(gather))
            hooks.append(module.register_forward_hook(partition, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
