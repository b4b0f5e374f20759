r"""Makes tasks of programming, and a tiny model that is to solve them, without a network.

python -m examples.code.make_data

`# the sum of a and b, times 3\ndef f(a, b): return ` -> `(a+b)*3`. Written to examples/code/data/:
`base/`, a Llama of half a million random weights; `demonstrations.jsonl`, tasks with a body for the
fine-tuning, half of which have a bug; `prompts.jsonl` and, held out, `eval.jsonl`, tasks with the
column tests: inputs, and what f gives for them.
"""

import json
import random
from itertools import product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
NUM_EVAL, NUM_DEMONSTRATIONS = 64, 8192
FIRST = {"sum": "+", "difference": "-", "product": "*"}
SECOND = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS = range(2, 30)
INPUTS = ((20, 9), (7, 30), (15, 15), (11, 4))
PIECES = ["# the ", *FIRST, " of ", " and ", ", ", *SECOND, " ", "\ndef f(a, b): return "]
"""Of a prompt; each is one token, as is any other character."""


def make_task(first: str, x: str, second: str, number: int) -> dict[str, Any]:
    y = "b" if x == "a" else "a"
    prompt = f"# the {first} of {x} and {y}, {second} {number}\ndef f(a, b): return "
    body = f"({x}{FIRST[first]}{y}){SECOND[second]}{number}"
    return {
        "prompt": prompt,
        "body": body,
        "tests": [[a, b, eval(body, {"a": a, "b": b})] for a, b in INPUTS],
    }


def with_bug(body: str, draw: random.Random) -> str:
    """As people write them: without the parentheses, with a and b the other way round, or with
    another sign. Some of these give the same for all inputs, and are right."""
    bugs = (
        body.translate(str.maketrans("", "", "()")),
        body.translate(str.maketrans("ab", "ba")),
        body.translate(str.maketrans("+-*", "-++")),
    )
    return draw.choice(bugs)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<bos>", "<eos>", *"0123456789ab+-*()"]
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
    draw = random.Random(0)
    tasks = [make_task(*each) for each in product(FIRST, "ab", SECOND, NUMBERS)]
    draw.shuffle(tasks)
    held_out, known = tasks[:NUM_EVAL], tasks[NUM_EVAL:]
    shown = draw.choices(known, k=NUM_DEMONSTRATIONS)
    half = NUM_DEMONSTRATIONS // 2
    shown[:half] = [task | {"body": with_bug(task["body"], draw)} for task in shown[:half]]
    draw.shuffle(shown)
    parts = {"demonstrations": shown, "prompts": known, "eval": held_out}
    for name, rows in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
