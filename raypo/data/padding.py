"""Pad rows of different lengths to one tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_right(rows: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Return the rows as one tensor [B, longest], padded with zeros on the right."""
    return _padded(rows, dtype, "right")


def pad_left(rows: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """Return the rows as one tensor [B, longest], padded with zeros on the left."""
    return _padded(rows, dtype, "left")


def _padded(rows: list[np.ndarray], dtype: torch.dtype, side: str) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_side=side)
