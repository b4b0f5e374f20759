"""Ragged rows as padded tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pad_right(rows: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """[B, longest], zeros behind the shorter rows."""
    padded = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.as_tensor(np.array(values))
    return padded


def pad_left(rows: list[np.ndarray], dtype: torch.dtype) -> Tensor:
    """[B, longest], zeros before the shorter rows."""
    width = max(map(len, rows), default=0)
    padded = torch.zeros(len(rows), width, dtype=dtype)
    for row, values in enumerate(rows):
        padded[row, width - len(values) :] = torch.as_tensor(np.array(values))
    return padded
