"""What a reward model says of whole sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# B sequences, L tokens, H hidden.


def sequence_scores(
    model: Any,  # a Hugging Face sequence classifier with one label
    ids: Tensor,  # [B, L] int64
    mask: Tensor,  # [B, L] bool, False on padding, which may stand on either side
) -> Tensor:
    """One score a sequence, [B] float32.

    Decoders (those with a `score` head) are read at the last token that the mask keeps. Their own
    forward looks for the last id that is not the padding id, and so misses an end of sequence
    that serves as padding too.
    """
    positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
    if not has_score_head(model):
        return model(input_ids=ids, attention_mask=mask.long()).logits[:, 0].float()
    hidden = model.base_model(
        input_ids=ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
    ).last_hidden_state  # [B, L, H]
    last = positions.argmax(dim=1)  # [B], the first of the largest: the last real token
    rows = last.new_tensor(range(len(last)))
    return model.score(hidden[rows, last]).squeeze(-1).float()


def has_score_head(model: Any) -> bool:
    """Whether the classifier is a decoder with a linear `score` head on its last token."""
    return hasattr(model, "score") and hasattr(model, "base_model")
