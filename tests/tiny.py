"""A tokenizer and a policy for tests: real Hugging Face folders, made in about a second."""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TOKENS: dict[str, Any] = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos"))}
SHARED: dict[str, Any] = TOKENS | {
    "vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS),
    "initializer_range": 0.1,  # large enough that the tokens' probabilities differ
    "dtype": torch.float32,
}


def character_tokenizer(
    *, further_tokens: tuple[str, ...] = (), chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A character-level tokenizer (one token a printable ASCII character).

    Args:
        further_tokens: Special tokens behind `SPECIAL_TOKENS`.
        chat_template: Its chat template.
    """
    tokens = (*SPECIAL_TOKENS, *further_tokens, *CHARACTERS)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(further_tokens),
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def tiny_tokenizer(folder: str | Path) -> Path:
    """Saves a character-level tokenizer into `folder`."""
    character_tokenizer().save_pretrained(folder)
    return Path(folder)


def tiny_policy(
    folder: str | Path,
    *,
    tied: bool = True,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    head_dim: int = 32,
    kv_heads: int | None = None,
    max_position_embeddings: int = 512,
) -> Path:
    """Saves a random float32 Llama with its tokenizer into `folder`.

    Args:
        tied: Whether the output head shares the embedding.
        head_dim: 32 or 64, or vLLM on CPU refuses the model.
        kv_heads: Heads of keys and values; None: as many as of queries.
    """
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head_dim,
        num_key_value_heads=kv_heads or hidden // head_dim,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tied,
        **SHARED,
    )
    return _save(config, Path(folder), seed=seed)


def tiny_experts(folder: str | Path, architecture: str, *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random float32 mixture of experts (two of four a token) with its tokenizer.

    Args:
        changes: Other values of its config.
    """
    sizes: dict[str, Any] = SHARED | {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
    }
    kinds: dict[str, Any] = {
        "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 32, "moe_intermediate_size": 32}),
        "qwen2_moe": (
            Qwen2MoeConfig,
            {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        ),
        "olmoe": (OlmoeConfig, {}),
        "mixtral": (MixtralConfig, {}),
    }
    kind, more = kinds[architecture]
    experts = {"num_local_experts" if architecture == "mixtral" else "num_experts": 4}
    return _save(kind(**(sizes | experts | more | changes)), Path(folder), seed=seed)


def _save(config: PreTrainedConfig, folder: Path, *, seed: int) -> Path:
    tiny_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(**TOKENS)
    model.save_pretrained(folder)
    return folder
