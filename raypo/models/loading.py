"""Models and tokenizers from Hugging Face folders or hub ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from raypo.config import ConfigError
from raypo.models.heads import HEADS, with_float32_heads
from raypo.models.linear import use_fastest_linear
from raypo.models.packed_attention import can_read_packed, use_packed_attention
from raypo.models.shares import whole_as_it_computes
from raypo.models.token_log_probs import has_plain_head


def load_causal_lm(path: str, *, dtype: str, attention: str = "auto") -> Any:
    """The causal language model of a folder or hub id, dropout off, in training mode.

    Args:
        attention: `model.attention`.

    Raises:
        ConfigError: the model or this machine does not have that attention.
    """
    model = _load(AutoModelForCausalLM, path, dtype, attention)
    with whole_as_it_computes(model):
        has_plain_head(model)  # tried here, before anybody trains it
    return model


def load_backbone(path: str, *, dtype: str, attention: str = "auto") -> Any:
    """The same network without its language-model head, dropout off."""
    return _load(AutoModel, path, dtype, attention)


def load_reward_model(path: str, *, dtype: str, attention: str = "auto") -> Any:
    """The sequence classifier with one label of a folder or hub id, dropout off.

    Its head is read and multiplies in float32, whatever the dtype of the body. A causal language
    model loads too: it gets a new score head, from torch's random state.

    Raises:
        ConfigError: the folder is a classifier with more than one label.
    """
    config = AutoConfig.from_pretrained(path)
    labels = getattr(config, "num_labels", 1)
    architectures = getattr(config, "architectures", None) or []
    if labels != 1 and any("SequenceClassification" in name for name in architectures):
        raise ConfigError(
            f"model.reward ({path}): it is a classifier with {labels} labels. A reward model has "
            f"one label: its score."
        )
    model = _load(AutoModelForSequenceClassification, path, dtype, attention, num_labels=1)
    return with_float32_heads(model)


def release_memory() -> None:
    """Give the GPU memory that torch keeps for later back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def same_vocabulary(path: str, other: str) -> bool:
    """Whether two folders or hub ids have tokenizers with the same tokens under the same ids."""
    return path == other or load_tokenizer(path).get_vocab() == load_tokenizer(other).get_vocab()


def is_causal(path: str) -> bool:
    """Whether no state of the backbone of a folder or hub id sees later tokens."""
    with torch.device("meta"):
        backbone = AutoModel.from_config(AutoConfig.from_pretrained(path))
    return all(getattr(module, "is_causal", True) for module in backbone.modules())


def vocabulary_size(path: str) -> int:
    """How many token ids the model of a folder or hub id knows; its tokenizer may have fewer."""
    return AutoConfig.from_pretrained(path).get_text_config().vocab_size


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a folder or hub id."""
    return AutoTokenizer.from_pretrained(path)


def stop_token_ids(path: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a response: the generation config's, else the tokenizer's end.

    Raises:
        ConfigError: neither names one, so no response could end by itself, or one of them is no
            token of the tokenizer.
    """
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        ids = None
    ids = tokenizer.eos_token_id if ids is None else ids
    found = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if ids is None or not found:
        raise ConfigError(
            f"model.policy ({path}): neither generation_config.json nor the tokenizer names an "
            f"end-of-sequence token. Set eos_token_id in generation_config.json."
        )
    for each in found:
        if not isinstance(each, int) or each < 0 or tokenizer.convert_ids_to_tokens(each) is None:
            raise ConfigError(
                f"model.policy ({path}): eos_token_id of its generation_config.json names "
                f"{each!r}, and its tokenizer, of {len(tokenizer)} tokens, has no such id. Correct "
                "eos_token_id in generation_config.json."
            )
    return found


def _load(kind: Any, path: str, dtype: str, attention: str, **config_values: Any) -> nn.Module:
    """A model with every dropout at 0: old and new log-probs must be of one function.

    The config is changed before the model is built, for many models keep the number itself.
    """
    config = AutoConfig.from_pretrained(path, **config_values)
    _turn_dropout_off(config)
    if kind is AutoModelForSequenceClassification and not is_deepspeed_zero3_enabled():
        _keep_heads_in_float32(kind, config)  # in shares DeepSpeed makes every weight in `dtype`
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        model = kind.from_pretrained(path, config=config, dtype=getattr(torch, dtype), **chosen)
    except (ImportError, ValueError) as error:
        if not chosen:
            raise
        raise ConfigError(
            f"model.attention ({attention}): {path} cannot be loaded with it: {error} "
            f"Set model.attention to auto."
        ) from error
    for module in model.modules():  # those that do not ask the config
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    use_fastest_linear(model)
    if attention == "auto" and can_read_packed(model):
        with whole_as_it_computes(model):
            use_packed_attention(model)
    return model.train()


def _keep_heads_in_float32(kind: Any, config: PretrainedConfig) -> None:
    """Heads that a folder has in float32 are read so; transformers asks the model's class."""
    with torch.device("meta"):  # only to learn which class it is
        architecture = type(kind.from_config(config))
    kept = set(architecture._keep_in_fp32_modules_strict or ())
    architecture._keep_in_fp32_modules_strict = kept | {rf"^{name}\." for name in HEADS}


def _turn_dropout_off(config: PretrainedConfig) -> None:
    """Set attention_dropout, resid_pdrop, layerdrop and their like to 0, in nested configs too."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _turn_dropout_off(value)
        elif isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
