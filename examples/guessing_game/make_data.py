"""Makes what the guessing game starts from, without a network: a model, a tokenizer, prompts.

python -m examples.guessing_game.make_data

Written to examples/guessing_game/data/: `policy/`, a Llama of 66 thousand random weights, and
`prompts.jsonl`: the prompt is always `?`, the label a number to find.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
NUMBERS = 8


def main(folder: Path = DATA) -> None:
    """Write model, tokenizer and prompts."""
    tokens = ["<pad>", "<bos>", "<eos>", *map(str, range(NUMBERS)), *"?<>!"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
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
    rows = [{"prompt": "?", "number": number} for number in range(NUMBERS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
