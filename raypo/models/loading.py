"""Models and tokenizers from Hugging Face folders or hub ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_causal_lm(path: str, *, dtype: str) -> Any:
    """The causal language model of a folder or hub id, dropout off, in training mode."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype])
    return without_dropout(model)


def load_backbone(path: str, *, dtype: str) -> Any:
    """The same network without its language-model head, dropout off."""
    return without_dropout(AutoModel.from_pretrained(path, dtype=DTYPES[dtype]))


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id."""
    return AutoTokenizer.from_pretrained(path)


def stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the generation config's, else the tokenizer's end of sequence.

    Raises:
        ValueError: neither names one; no response could ever end by itself.
    """
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        ids = None
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        raise ValueError(
            f"model.policy ({path}): neither generation_config.json nor the tokenizer names an "
            f"end-of-sequence token. Set eos_token_id in generation_config.json."
        )
    return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at 0: old and new log-probs must be of one function."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
    return model.train()


def engine_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | Tensor]]:
    """Every weight under its checkpoint name, a tied head included under its own name.

    A serving engine may keep a packed copy of the head, so a head that is tied to the embedding
    is still named: what is not sent is silently kept old.
    """
    yield from model.named_parameters(remove_duplicate=False)


def vocabulary_size(path: str) -> int | None:
    """`vocab_size` of a local folder's config.json; None when it is not there to read."""
    config = Path(path) / "config.json"
    return json.loads(config.read_text()).get("vocab_size") if config.is_file() else None
