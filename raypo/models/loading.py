"""Loading of models and tokenizers from Hugging Face folders or hub ids."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from raypo.config import ConfigError
from raypo.models.checkpoint import check_loaded, first_line, network_class, read_config
from raypo.models.heads import HEADS, with_float32_heads
from raypo.models.linear import use_fastest_linear
from raypo.models.model_files import VISION, max_positions
from raypo.models.model_folder import ModelFolder, read_generation_config
from raypo.models.packed_attention import can_read_packed, use_packed_attention
from raypo.models.shares import whole_as_it_computes
from raypo.models.token_log_probs import has_plain_head
from raypo.models.vision import modules_of_decoder, placeholder_id


def language_class(path: str, *, key: str = "model") -> Any:
    """Return transformers' Auto class of a policy or a reference model.

    A model that can read images keeps its vision tower, even if a run has no images.

    Args:
        path: Folder or hub id.
        key: The config key that names the model, for messages.
    """
    reads_images = read_config(path, key=key).model_type in VISION
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def load_causal_lm(path: str, *, dtype: str, attention: str = "auto") -> Any:
    """Load a causal language model in training mode, with dropout off.

    Args:
        path: Folder or hub id.
        dtype: float32 or bfloat16.
        attention: `model.attention`.

    Raises:
        ConfigError: weights are missing, or the model or this machine does not support that
            attention.
    """
    model: Any = _load(language_class(path), path, dtype, attention)
    token = placeholder_id(model.config)
    if token is not None:
        model.get_output_embeddings().placeholder_id = token
    with whole_as_it_computes(model):
        has_plain_head(model)  # cache the answer while the weights are gathered
    return model


def load_backbone(path: str, *, dtype: str, attention: str = "auto") -> Any:
    """Load a causal language model without its head, with dropout off."""
    return _load(AutoModel, path, dtype, attention)


def load_reward_model(
    path: str, *, dtype: str, attention: str = "auto", new_head: bool = False
) -> Any:
    """Load a sequence classifier with one label, with dropout off.

    Its head is loaded and computes in float32, whatever the dtype of the backbone.

    Args:
        path: Folder or hub id.
        dtype: float32 or bfloat16.
        attention: `model.attention`.
        new_head: Also accept a model without a score head, such as a causal language model. It gets
            a new head, initialised from torch's random state.

    Raises:
        ConfigError: the folder is a classifier with more than one label, or weights are missing.
    """
    check_classifier("model.reward", path)
    model = _load(
        AutoModelForSequenceClassification, path, dtype, attention, new_head=new_head, num_labels=1
    )
    return with_float32_heads(model)


LAST_TOKEN_CLASSIFIERS = ("ctrl", "modernbert-decoder", "t5gemma", "t5gemma2", "xlnet")
"""Architectures whose classifiers have no `score` head, which `sequence_scores` could apply to the
right token, and whose own forward pass takes the last token without regard to the attention
mask; and those of T5Gemma, whose head is on a decoder that an encoder feeds."""


def check_classifier(key: str, path: str) -> None:
    """Raise if a model is a sequence classifier that cannot be a reward model.

    Raises:
        ConfigError: the model has more than one label, or would read its score from padding.
    """
    config = read_config(path, key=key)
    if config.model_type in LAST_TOKEN_CLASSIFIERS:
        raise ConfigError(
            f"{key} ({path}): classifiers of the architecture {config.model_type} read their score "
            "from the last token of a padded batch. Give a reward model of another architecture."
        )
    labels = getattr(config, "num_labels", 1)
    architectures = getattr(config, "architectures", None) or []
    told, _ = PretrainedConfig.get_config_dict(path)
    if not {"num_labels", "id2label"} & told.keys():
        return  # transformers' default is 2 labels; the shape of the head is checked at loading
    if labels != 1 and any("SequenceClassification" in name for name in architectures):
        raise ConfigError(
            f"{key} ({path}): it is a classifier with {labels} labels. A reward model has one "
            f"label: its score."
        )


def release_memory() -> None:
    """Return torch's cached GPU memory to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def same_vocabulary(path: str, other: str, *, key: str = "model.policy") -> bool:
    """Return True if two folders or hub ids have tokenizers with the same tokens and ids.

    Args:
        path: First folder or hub id.
        other: Second folder or hub id.
        key: The config key that names the first, for messages.
    """
    if path == other:
        return True
    return load_tokenizer(path, key=key).get_vocab() == load_tokenizer(other).get_vocab()


def reads_tokens(path: str, policy: str, *, key: str) -> bool:
    """Return True if a model reads all token ids of a policy's rows as the policy does.

    One of the two tokenizers may have additional tokens, such as a pad token added for training, if
    these tokens occur in no row. They must be special, must not be a bos, eos or stop token, and
    must not be in the chat template. If the policy's tokenizer has the additional tokens, the
    model's embedding must cover all of them that the policy's embedding covers.

    Otherwise the embeddings may differ in size. For example, Qwen2.5 0.5B and 7B pad the same
    vocabulary to different sizes. An id without a token occurs in no prompt, and the models have
    learned not to sample it.

    Args:
        path: Folder or hub id of the model that reads the rows.
        policy: Folder or hub id of the policy.
        key: The config key that names the model, for messages.
    """
    if path == policy:
        return True
    reader, writer = load_tokenizer(path, key=key), load_tokenizer(policy)
    read, written = reader.get_vocab().items(), writer.get_vocab().items()
    more, less = written - read, read - written
    if not more:
        return _are_spare(reader, less, ())
    size, own_size = vocabulary_size(policy), vocabulary_size(path)
    has_rows = all(token_id >= size or token_id < own_size for _, token_id in more)
    return not less and has_rows and _are_spare(writer, more, stop_token_ids(policy, writer))


def _are_spare(tokenizer: Any, tokens: Iterable[tuple[str, int]], stop: Sequence[int]) -> bool:
    """Return True if the given tokens cannot occur in tokenised data.

    This holds for special tokens that are neither bos, eos, stop tokens nor in the chat template.
    Whether a prompt spells out the name of such a token is not checked.
    """
    used = {*stop, tokenizer.bos_token_id, tokenizer.eos_token_id}
    added, template = tokenizer.added_tokens_decoder, str(tokenizer.chat_template)
    return all(
        number in added and added[number].special and number not in used and name not in template
        for name, number in tokens
    )


_UNTRAINABLE = {
    "mllama": "gives it no backbone that returns hidden states",
    "phimoe": "draws its experts at random in training, so log-probs could not be repeated",
    "reformer": "trains it on rows of a single length only",
}
"""Reasons why raypo cannot train an architecture as transformers (5.19) has it, by model type."""


def check_trainable(key: str, path: str) -> None:
    """Refuse an architecture that transformers loads but that raypo cannot train.

    Raises:
        ConfigError: the model is of such an architecture.
    """
    kind = read_config(path, key=key).model_type
    if kind in _UNTRAINABLE:
        raise ConfigError(
            f"{key} ({path}): of the architecture {kind}, and transformers {_UNTRAINABLE[kind]}. "
            "Give a model of another architecture."
        )


def check_tokens(path: str, *, key: str = "model.policy") -> None:
    """Refuse a policy whose special tokens have no row in its embedding.

    Other tokens of the tokenizer may lack a row. `Limits.check` refuses data that contains them.

    Args:
        path: Folder or hub id of the policy.
        key: The config key that names it, for messages.

    Raises:
        ConfigError: the tokenizer's bos or eos, or a stop token, has no row.
    """
    tokenizer, size = load_tokenizer(path, key=key), vocabulary_size(path)
    ends = dict.fromkeys(stop_token_ids(path, tokenizer, key=key), "its stop token")
    named = {tokenizer.bos_token_id: "its first token (bos)", tokenizer.eos_token_id: "its eos"}
    for token, name in {**ends, **named}.items():
        if token is not None and not 0 <= token < size:
            raise ConfigError(
                f"{key} ({path}): {name} has the id {token}, but the model has embeddings for "
                f"ids 0 to {size - 1}. Give the tokenizer and the generation_config.json that "
                "belong to the model, or resize its embeddings (resize_token_embeddings)."
            )


@dataclass(frozen=True)
class Limits:
    """Limits of a model's input: vocabulary and number of positions."""

    path: str
    vocabulary: int
    """Rows of the embedding."""
    positions: int | None
    """Longest sequence that the model has positions for, in tokens. None means no limit."""

    @classmethod
    def of(cls, path: str) -> Limits:
        """Read the limits from the config of a folder or hub id."""
        config = read_config(path)
        return cls(path, vocabulary_size(path), max_positions(config.to_dict()))

    def check(self, rows: Iterable[Sequence[np.ndarray]], tokenizer: Any, *, key: str) -> None:
        """Raise on rows that the model cannot read; on a GPU they would cause a device assert.

        Args:
            rows: Parts of each row, int [T] each: the prompt and, if any, the response.
            tokenizer: Tokenizer of the model, for messages.
            key: The config key that the rows come from, for messages.

        Raises:
            ConfigError: a token has no row in the embedding, or a row has too many tokens.
        """
        for parts in rows:
            largest = max((int(part.max()) for part in parts if len(part)), default=0)
            length = sum(map(len, parts))
            fits = self.positions is None or length <= self.positions
            if largest < self.vocabulary and fits:
                continue
            start = tokenizer.decode(np.concatenate(parts)[:START])
            row = f"{key}: the row that begins with {start!r}"
            if largest >= self.vocabulary:
                raise ConfigError(
                    f"{row} has the token {tokenizer.convert_ids_to_tokens(largest)!r} "
                    f"({largest}), but model.policy ({self.path}) has embeddings for ids 0 to "
                    f"{self.vocabulary - 1}. Give the tokenizer of the model, or resize its "
                    "embeddings (resize_token_embeddings)."
                )
            raise ConfigError(
                f"{row} has {length} tokens, but model.policy ({self.path}) has positions for "
                f"{self.positions}. Lower data.max_prompt_tokens and data.max_response_tokens to "
                f"{self.positions} in sum: longer rows are then skipped."
            )


START = 16
"""Number of tokens of a row that an error message shows."""


def is_causal(path: str) -> bool:
    """Return True if the attention of a model's backbone never sees later tokens."""
    with torch.device("meta"):
        backbone = AutoModel.from_config(read_config(path))
    return all(getattr(module, "is_causal", True) for module in modules_of_decoder(backbone))


def vocabulary_size(path: str) -> int:
    """Return the size of a model's vocabulary; its tokenizer may have fewer tokens."""
    return read_config(path).get_text_config().vocab_size


def load_tokenizer(path: str, *, key: str = "model.policy") -> Any:
    """Load the tokenizer of a folder or hub id.

    Args:
        path: Folder or hub id.
        key: The config key that names it, for messages.

    Raises:
        ConfigError: there is no tokenizer that transformers can load.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{key} ({path}): transformers finds no tokenizer there that it can load: "
            f"{first_line(error)} Save one beside the model (tokenizer.save_pretrained), like that "
            f"of its base model."
        ) from error


def stop_token_ids(path: str, tokenizer: Any, *, key: str = "model.policy") -> tuple[int, ...]:
    """Return the ids of the tokens that end a response.

    They come from the generation config, or from the tokenizer if the generation config has none.

    Args:
        path: Folder or hub id of the model.
        tokenizer: Tokenizer of the model.
        key: The config key that names the model, for messages.

    Raises:
        ConfigError: there is no such token, so that no response could end by itself; or the
            tokenizer lacks one of the ids.
    """
    generation_config = read_generation_config(path, key=key)
    ids = generation_config and generation_config.eos_token_id
    ids = tokenizer.eos_token_id if ids is None else ids
    token_ids = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if ids is None or not token_ids:
        raise ConfigError(
            f"{key} ({path}): neither generation_config.json nor the tokenizer names an "
            f"end-of-sequence token. Set eos_token_id in generation_config.json."
        )
    for token_id in token_ids:
        if (
            not isinstance(token_id, int)
            or token_id < 0
            or tokenizer.convert_ids_to_tokens(token_id) is None
        ):
            raise ConfigError(
                f"{key} ({path}): eos_token_id of its generation_config.json names {token_id!r}, "
                f"but its tokenizer, with {len(tokenizer)} tokens, has no such id. Correct "
                "eos_token_id in generation_config.json."
            )
    return token_ids


def _load(
    kind: Any,
    path: str,
    dtype: str,
    attention: str,
    *,
    new_head: bool = False,
    **config_values: Any,
) -> nn.Module:
    """Load a model without dropout and router noise: old and new log-probs are comparable."""
    config = read_config(path, **config_values)
    of_files = copy.deepcopy(config)
    _set_dropout(config)  # before the model is built: many models store the number itself
    network = network_class(kind, config, path)
    if kind is AutoModelForSequenceClassification and not is_deepspeed_zero3_enabled():
        _keep_heads_in_float32(network)  # at ZeRO-3, DeepSpeed creates every weight in `dtype`
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        model, info = kind.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `check_loaded` raises and names them
            **chosen,
        )
    except (ImportError, ValueError) as error:
        if not chosen:
            raise ConfigError(
                f"model ({path}): transformers cannot load it: {first_line(error)} Install what "
                "it needs, or give another model."
            ) from error
        raise ConfigError(
            f"model.attention ({attention}): {path} cannot be loaded with it: {error} "
            f"Set model.attention to auto."
        ) from error
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model ({path}): its files include an adapter (adapter_config.json), so "
            "transformers loads the model with frozen base weights. Merge it into its base "
            "model (merge_and_unload of peft, save_pretrained) and give that folder."
        )
    check_loaded(model, info, path=path, new_head=new_head)
    exported = copy.deepcopy(model.config)
    has_part = type(of_files) is not type(exported)  # only the language model of a larger one
    _set_dropout(exported, of_files.get_text_config() if has_part else of_files)
    folder = ModelFolder.of(path, exported, getattr(model, "generation_config", None))
    for network in {model, model.base_model}:  # a critic is only the latter
        network.raypo_folder = folder
    for module in model.modules():  # dropout that the config does not control
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    use_fastest_linear(model)
    if attention == "auto" and can_read_packed(model):
        use_packed_attention(model)
    return model.train()


def _keep_heads_in_float32(network: Any) -> None:
    """Make transformers load heads in float32; it reads the setting from the model's class."""
    modules = set(network._keep_in_fp32_modules_strict or ())
    network._keep_in_fp32_modules_strict = modules | {rf"^{name}\." for name in HEADS}


def _set_dropout(config: PretrainedConfig, values: PretrainedConfig | None = None) -> None:
    """Set attention_dropout, resid_pdrop, layerdrop etc., in nested configs too.

    The noise of a mixture's router (`router_jitter_noise`) is set as well.

    Args:
        config: The config to change.
        values: Config with the values to set. None sets 0.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _set_dropout(value, values and getattr(values, name))
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, getattr(values, name) if values else 0.0)
