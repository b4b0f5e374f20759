"""AdamW, or Muon for the matrices of the layers and AdamW for all other weights.

Papers: Loshchilov & Hutter 2017 (AdamW), arXiv:1711.05101; Jordan et al. 2024 (Muon),
https://kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982, section 2.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from raypo.config import ConfigError, WorkersSection
from raypo.learner.deepspeed_internals import mark_for_muon, new_muon
from raypo.models.shares import whole_shape

MOMENTUM = 0.95
"""Muon's decay rate of the gradients' moving average."""
UPDATE_RMS = 0.2
"""Root mean square of Muon's updates in units of the learning rate, about as for AdamW."""

Group = dict[str, Any]
"""A parameter group of a torch optimizer."""


def new_optimizer(
    parameters: Sequence[nn.Parameter], networks: Iterable[nn.Module], section: WorkersSection
) -> torch.optim.Optimizer:
    """Return the optimizer of `learner.optimizer`, with a learning rate of 0.

    DeepSpeed's Muon multiplies an orthogonal update of size m x n by sqrt(max(1, m / n)). The paper
    of 2025 multiplies it by 0.2 sqrt(max(m, n)), so that learning rates for AdamW also suit Muon.
    The ratio of these two factors, 0.2 sqrt(n), is applied to the learning rate, so matrices with
    the same n form a parameter group.

    Args:
        parameters: The weights to train.
        networks: The Hugging Face models that the weights belong to. Muon updates the linear layers
            below their heads, but no embedding.
        section: Constants of the optimizer.

    Raises:
        ConfigError: Muon has nothing to update.
    """
    if section.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=0.0, fused=True, **_adamw(section))
    matrices = {id(weight) for weight in _matrices(networks)}
    groups: dict[int, Group] = {}
    rest: list[nn.Parameter] = []
    for parameter in parameters:
        is_muon = id(parameter) in matrices
        mark_for_muon(parameter, is_muon=is_muon)
        if not is_muon:
            rest.append(parameter)
            continue
        columns = whole_shape(parameter)[1]
        scale = UPDATE_RMS * math.sqrt(columns)
        group = groups.setdefault(columns, {"params": [], "use_muon": True, "rate_factor": scale})
        group["params"].append(parameter)
    if not groups:
        raise ConfigError(
            "learner.optimizer (muon): the model has no linear layers that Muon could update. Set "
            "learner.optimizer to adamw."
        )
    whole = [*groups.values(), *([{"params": rest, "use_muon": False}] if rest else [])]
    return new_muon([group | constants_of(group, section) | {"lr": 0.0} for group in whole])


def set_learning_rate(groups: Iterable[Group], learning_rate: float) -> None:
    """Set the learning rate of each group, times the group's factor if it has one."""
    for group in groups:
        group["lr"] = learning_rate * group.get("rate_factor", 1.0)


def constants_of(group: Group, section: WorkersSection) -> Group:
    """Return a group's constants from the config, without the learning rate."""
    if not group.get("use_muon"):
        return _adamw(section)
    # The optimizer multiplies weight decay by the group's learning rate, which includes the factor.
    decay = section.weight_decay / group["rate_factor"]
    return {"momentum": MOMENTUM, "weight_decay": decay}


def compiled_only_on_gpus() -> AbstractContextManager[Any]:
    """Return a context that disables torch.compile if there is no GPU.

    DeepSpeed compiles Muon's update once for each shape. On a CPU, compiling takes longer than it
    saves.
    """
    if torch.cuda.is_available():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def _matrices(networks: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for network in networks:
        for module in network.base_model.modules():  # type: ignore[union-attr, operator]
            if isinstance(module, nn.Linear):
                yield module.weight


def _adamw(section: WorkersSection) -> Group:
    return {
        "betas": section.adam_betas,
        "eps": section.adam_eps,
        "weight_decay": section.weight_decay,
    }
