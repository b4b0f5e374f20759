"""Scores of whole sequences by a reward model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from raypo.models.packed_attention import hidden_states
from raypo.models.packing import pack
from raypo.models.sequence_parallel import SequenceGroup, sliced
from raypo.types import to_device

# B sequences, L tokens, H hidden.


def sequence_scores(
    model: Any,  # a Hugging Face sequence classifier with one label
    prompts: Sequence[np.ndarray],  # int [P] each
    responses: Sequence[np.ndarray],  # int [T] each
    *,
    group: SequenceGroup | None = None,
) -> Tensor:
    """Return one score for each prompt with its response, [B] float32.

    Decoders (models with a `score` head) are scored at the last token. For decoders, a prompt that
    several sequences share is computed once. transformers' own forward would score at the last id
    that is not the padding id, which is wrong if the end of sequence also serves as padding.

    The workers of a group, if there is one, share the tokens of a decoder's pass.
    """
    device = model.device
    if not has_score_head(model):
        rows = [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]
        ids = pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
        read = model(
            input_ids=to_device(ids, device), attention_mask=to_device(mask.long(), device)
        )
        return read.logits[:, 0].float()
    packed = pack(prompts, responses, with_last=True, device=device)
    ends = torch.tensor([len(response) + 1 for response in responses]).cumsum(0) - 1
    last = sliced(replace(packed, states=packed.states[to_device(ends, device)]), group)
    return last.joined(model.score(hidden_states(model.base_model, last)).squeeze(-1).float())


def has_score_head(model: Any) -> bool:
    """Return True if the classifier is a decoder with a linear `score` head on its last token."""
    return hasattr(model, "score") and hasattr(model, "base_model")
