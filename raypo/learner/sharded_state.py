"""Checkpoints of master weights and optimizer moments for any worker count and ZeRO stage.

Each worker writes one file with the fragments that it holds. A fragment is a range of a flattened
parameter, stored under the parameter's name. To load, a worker copies from all files the parts that
overlap its own fragments (`deepspeed_internals.fragments`), so any number of workers at any ZeRO
stage can read the files. The universal checkpoints of DeepSpeed must be converted before loading,
and do not exist for stage 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import ConfigError


@dataclass(frozen=True)
class Moment:
    """Range of a flattened parameter, and the location of this worker's moments for that range.

    The range is the same as that of the weights, except for Muon at ZeRO stages 1 and 2. There, a
    worker with a part of a parameter's weights holds the moments of the whole parameter
    (DeepSpeed 0.19).
    """

    start: int
    """Index of the range's first element in the flattened parameter."""
    size: int
    offset: int
    """Index of the range's first element in the flattened tensor of moments."""
    shape: tuple[int, ...]
    """Shape of the tensor of moments."""
    dtype: torch.dtype

    def of(self, tensor: Tensor, first: int, last: int) -> Tensor:
        """Return a view of the moments of the elements `first` to `last` (exclusive)."""
        begin = self.offset + first - self.start
        return tensor.detach().view(-1)[begin : begin + last - first]


@dataclass(frozen=True)
class Fragment:
    """Range of a flattened parameter, and its location in a tensor that the optimizer updates."""

    name: str
    numel: int
    """Number of elements of the whole parameter."""
    start: int
    """Index of the fragment's first element in the flattened parameter."""
    size: int
    owner: Tensor
    """Tensor that the optimizer updates: the parameter itself, or at ZeRO stages 1 to 3 a flat
    float32 tensor that holds fragments of many parameters."""
    offset: int = 0
    """Index of the fragment's first element in the flattened owner."""
    is_on_every_worker: bool = False
    """True at stage 0, where all workers hold the same fragments."""
    is_muon: bool = False
    """True if Muon updates the parameter, False for AdamW."""
    moment: Moment | None = None
    """Layout of the moments. None means the layout of the owner."""

    def of(self, tensor: Tensor) -> Tensor:
        """Return a view of the fragment in a tensor that is laid out like the owner."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]

    @property
    def of_moment(self) -> Moment:
        """Layout of the optimizer's moments: `moment` if set, else the layout of `owner`."""
        owner = self.owner
        if self.moment:
            return self.moment
        return Moment(self.start, self.size, self.offset, owner.shape, owner.dtype)


def saved_fragments(
    held: Sequence[Fragment], optimizer: torch.optim.Optimizer, workers: Workers
) -> dict[str, Any]:
    """Return views of the fragments that this worker saves, without a copy.

    A fragment that all workers hold is saved by one of them.

    Args:
        held: The fragments of this worker.
        optimizer: Optimizer that holds the moments of the fragments.
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
            "moments": {
                key: fragment.of_moment.of(moment, fragment.start, fragment.start + fragment.size)
                for key, moment in _moments(optimizer, fragment)
            },
            "step": optimizer.state.get(fragment.owner, {}).get("step"),
        }
    return saved


def load_fragments(
    paths: Sequence[Path], held: Sequence[Fragment], optimizer: torch.optim.Optimizer
) -> None:
    """Load this worker's fragments and their moments from files of `saved_fragments`.

    Args:
        paths: The files of all workers that saved.
        held: The fragments of this worker. Their weights are overwritten.
        optimizer: Optimizer whose state is replaced by the saved moments.

    Raises:
        ConfigError: the files are from a run with another optimizer.
        RuntimeError: the files lack a part of a parameter.
    """
    # Memory-mapped, so that a worker reads only the parts that it copies.
    files = [torch.load(path, weights_only=True, mmap=True, map_location="cpu") for path in paths]
    optimizer.state.clear()
    for fragment in held:
        missing = fragment.size
        for part in (saved[fragment.name] for saved in files if fragment.name in saved):
            if part["numel"] != fragment.numel:
                continue
            _load_moments(part, fragment, optimizer)
            first, last = _overlap(part, fragment.start, fragment.size)
            if first >= last:
                continue
            missing -= last - first
            here = slice(first - fragment.start, last - fragment.start)
            there = slice(first - part["start"], last - part["start"])
            fragment.of(fragment.owner)[here].copy_(part["weight"][there])
        if missing:
            raise RuntimeError(f"the state of {fragment.name} is missing or has another shape")


def _load_moments(
    part: dict[str, Any], fragment: Fragment, optimizer: torch.optim.Optimizer
) -> None:
    layout = fragment.of_moment
    first, last = _overlap(part, layout.start, layout.size)
    if first >= last or not part["moments"]:  # no overlap, or no update yet
        return
    if fragment.is_muon != ("momentum_buffer" in part["moments"]):
        own, other = ("muon", "adamw") if fragment.is_muon else ("adamw", "muon")
        raise ConfigError(
            f"learner.optimizer ({own}): the checkpoint has the state of {other}. Set it to "
            f"{other}, or load only the weights, with model.policy."
        )
    device = fragment.owner.device
    state = optimizer.state[fragment.owner]
    if part["step"] is not None:
        # Create the step count as AdamW does. A flat owner has one count for all its fragments, and
        # each saved fragment has its own, so take the largest.
        count = state.setdefault("step", torch.zeros((), device=device))
        count.fill_(max(count.item(), part["step"].item()))
    for key, moment in part["moments"].items():
        if key not in state:
            state[key] = torch.zeros(layout.shape, dtype=layout.dtype, device=device)
        there = slice(first - part["start"], last - part["start"])
        layout.of(state[key], first, last).copy_(moment[there])


def _overlap(part: dict[str, Any], start: int, size: int) -> tuple[int, int]:
    """Return the overlap of a saved fragment with a range: first element and end (exclusive)."""
    end = part["start"] + part["weight"].numel()
    return max(start, part["start"]), min(start + size, end)


def _moments(optimizer: torch.optim.Optimizer, fragment: Fragment) -> Iterator[tuple[str, Tensor]]:
    for key, value in optimizer.state.get(fragment.owner, {}).items():
        if key == "step":
            continue
        if value.numel() != math.prod(fragment.of_moment.shape):
            raise RuntimeError(f"{key} of {fragment.name} does not have the shape of its weights")
        yield key, value
