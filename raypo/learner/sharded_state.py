"""Master weights and AdamW's moments in files that depend neither on workers nor on ZeRO stages.

Each worker writes the fragments that it holds: ranges of flattened parameters, by the parameter's
name. A reader copies from all files what overlaps its own fragments, so any number of workers at
any ZeRO stage can read them. DeepSpeed's universal checkpoints need a conversion of all files
before they are loaded, and do not exist for stage 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.learner.state import write_tensors


@dataclass(frozen=True)
class Fragment:
    """Range of a flattened parameter, and its place in a tensor that AdamW updates."""

    name: str
    numel: int
    """Number of elements of the whole parameter."""
    start: int
    """Index of its first element in the flattened parameter."""
    size: int
    owner: Tensor
    """Tensor that AdamW updates: the parameter, or at ZeRO stages 1 to 3 a flat float32 one that
    holds fragments of many parameters."""
    offset: int = 0
    """Index of its first element in the flattened owner."""
    is_on_every_worker: bool = False
    """True at stage 0, where all workers hold the same."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view of the fragment in the owner, or in a moment of the owner."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


def fragments(engine: Any, optimizer: torch.optim.Optimizer, workers: Workers) -> list[Fragment]:
    """Return the fragments of the trained parameters that this worker holds.

    Args:
        engine: A DeepSpeedEngine.
        optimizer: The torch optimizer that it steps.
        workers: The workers that train the model.
    """
    return list(_fragments(engine, optimizer, workers))


def _fragments(
    engine: Any, optimizer: torch.optim.Optimizer, workers: Workers
) -> Iterator[Fragment]:
    zero = engine.optimizer
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id"):  # stage 3; the last worker's part may end with padding
            group, offset, share = zero.grad_position[zero.get_param_id(parameter)]
            numel, start = parameter.ds_numel, workers.rank * share
            if (size := min(share, numel - start)) > 0:
                owner = zero.fp32_partitioned_groups_flat[group]
                yield Fragment(name, numel, start, size, owner, offset)
        elif hasattr(parameter, "_hp_mapping"):  # stages 1 and 2, and BF16_Optimizer
            if (part := parameter._hp_mapping) is not None:
                (owner,) = optimizer.param_groups[part.param_group_index]["params"]
                low, high = part.lp_fragment_address, part.hp_fragment_address
                yield Fragment(name, parameter.numel(), low.start, low.numel, owner, high.start)
        else:
            numel = parameter.numel()
            yield Fragment(name, numel, 0, numel, parameter, is_on_every_worker=True)


def save_fragments(
    path: Path, held: Sequence[Fragment], optimizer: torch.optim.Optimizer, workers: Workers
) -> None:
    """Write this worker's fragments; what every worker holds is written by one of them.

    Args:
        path: File to write.
        held: The fragments.
        optimizer: Optimizer with their moments.
        workers: The workers that train the model.
    """
    saved: dict[str, dict[str, Any]] = {}
    for index, fragment in enumerate(held):
        if fragment.is_on_every_worker and index % workers.count != workers.rank:
            continue
        saved[fragment.name] = {
            "numel": fragment.numel,
            "start": fragment.start,
            "weight": fragment.of(fragment.owner),
            "moments": {key: fragment.of(moment) for key, moment in _moments(optimizer, fragment)},
            "step": optimizer.state.get(fragment.owner, {}).get("step"),
        }
    write_tensors(path, saved)


def load_fragments(
    paths: Sequence[Path], held: Sequence[Fragment], optimizer: torch.optim.Optimizer
) -> None:
    """Read this worker's fragments from the files of all workers that saved them.

    Args:
        paths: The files.
        held: The fragments.
        optimizer: Optimizer that gets their moments.

    Raises:
        RuntimeError: the files lack a part of a parameter.
    """
    # Mapped, so that a worker reads only what it copies.
    files = [torch.load(path, weights_only=True, mmap=True, map_location="cpu") for path in paths]
    optimizer.state.clear()
    for fragment in held:
        missing = fragment.size
        for part in (saved[fragment.name] for saved in files if fragment.name in saved):
            first = max(fragment.start, part["start"])
            last = min(fragment.start + fragment.size, part["start"] + part["weight"].numel())
            if part["numel"] != fragment.numel or first >= last:
                continue
            missing -= last - first
            here = slice(first - fragment.start, last - fragment.start)
            there = slice(first - part["start"], last - part["start"])
            fragment.of(fragment.owner)[here].copy_(part["weight"][there])
            state = optimizer.state[fragment.owner]
            if part["step"] is not None:
                # As AdamW creates it. A flat owner has one count for fragments that have one each.
                count = state.setdefault("step", torch.zeros((), device=fragment.owner.device))
                count.fill_(max(count.item(), part["step"].item()))
            for key, moment in part["moments"].items():
                whole = state.setdefault(key, torch.zeros_like(fragment.owner))
                fragment.of(whole)[here].copy_(moment[there])
        if missing:
            raise RuntimeError(f"the state of {fragment.name} is missing or has another shape")


def _moments(optimizer: torch.optim.Optimizer, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
    for key, value in optimizer.state.get(fragment.owner, {}).items():
        if key == "step":
            continue
        if value.numel() != fragment.owner.numel():
            raise RuntimeError(f"{key} of {fragment.name} does not have the shape of its weights")
        yield key, value
