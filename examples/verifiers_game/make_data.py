"""Makes the model that learns the game, without a network.

python -m examples.verifiers_game.make_data

Written to examples/verifiers_game/data/policy: a Llama of 66 thousand random weights, whose chat
template writes the contents of the messages one after another.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def main(folder: Path = DATA) -> None:
    """Write model and tokenizer."""
    tokens = ["<pad>", "<bos>", "<eos>", *map(str, range(8)), *"?<>!"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,  # heads of 32: vLLM on CPU takes no smaller ones
            max_position_embeddings=64,
            dtype=torch.float32,
            **special,
        )
    )
    policy.generation_config = GenerationConfig(**special)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


if __name__ == "__main__":
    main()
