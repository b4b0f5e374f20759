r"""Makes tasks of programming, and a tiny model that is to solve them, without a network.

python -m examples.code.make_data

`assert f(4, 1) == 6\nassert ...\ndef f(a, b): return ` -> `a+b+1`. Written to examples/code/data/:
`base/`, a Llama of half a million random weights; `prompts.jsonl` and, held out, `eval.jsonl`, with
the columns prompt, body (for the fine-tuning) and tests: what f gives for `reward.INPUTS`.
"""

import json
import random
from collections.abc import Iterable
from itertools import permutations, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.code.reward import INPUTS

DATA = Path(__file__).parent / "data"
NUM_EVAL, NUM_ASSERTS = 256, 3
SHOWN = ((1, 2), (4, 1), (2, 5), (3, 3), (5, 3), (2, 1))
"""The inputs of which a prompt shows some."""
BEGIN = "def f(a, b): return "
PIECES = ["assert f(", ", ", ") == ", "\n", BEGIN]
"""Of a prompt; each is one token, as is any other character."""


def bodies() -> list[str]:
    """`a+b`, `b-a*2` and their like, the first of those that give the same."""
    ends = ["", *map("".join, product("+-*", "12"))]
    by_outputs: dict[tuple[int, ...], str] = {}
    for x, sign, y, end in product("ab", "+-*", "ab", ends):
        body = f"{x}{sign}{y}{end}"
        if x != y:
            by_outputs.setdefault(tuple(value(body, a, b) for a, b in INPUTS), body)
    return list(by_outputs.values())


def value(body: str, a: int, b: int) -> int:
    """Of this file's own code; what a model wrote is for the sandbox."""
    return eval(body, {"a": a, "b": b})


def make_task(body: str, shown: Iterable[tuple[int, int]]) -> dict[str, Any]:
    asserts = "".join(f"assert f({a}, {b}) == {value(body, a, b)}\n" for a, b in shown)
    tests = [value(body, a, b) for a, b in INPUTS]
    return {"prompt": asserts + BEGIN, "body": body, "tests": tests}


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<bos>", "<eos>", *"0123456789ab+-*"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.add_tokens(PIECES)
    return tokenizer


def make_policy(num_tokens: int) -> LlamaForCausalLM:
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,  # heads of 32: vLLM on CPU takes no smaller ones
            max_position_embeddings=64,
            tie_word_embeddings=True,
            dtype=torch.float32,
            **special,
        )
    )
    policy.generation_config = GenerationConfig(**special)
    return policy


def main(folder: Path = DATA) -> None:
    """Write model, tokenizer and tasks."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    make_policy(len(tokenizer)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    rows = [make_task(*each) for each in product(bodies(), permutations(SHOWN, NUM_ASSERTS))]
    random.Random(0).shuffle(rows)
    for name, part in (("eval", rows[:NUM_EVAL]), ("prompts", rows[NUM_EVAL:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
