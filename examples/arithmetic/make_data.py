r"""Makes arithmetic word tasks, and a tiny model that is to learn them, without a network.

python -m examples.arithmetic.make_data

`Ana has 12 plums and buys 9 more. How many plums are there?` -> `12+9=21\n#### 21`, as in GSM8K.
Written to examples/arithmetic/data/: `base/`, a Llama of half a million parameters with random
weights; `prompts.jsonl` and, held out from all training, `eval.jsonl`, both with the columns
question and answer.
"""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(__file__).parent / "data"
NUM_TRAIN, NUM_EVAL = 3500, 256
NAMES = ("Ana", "Ben", "Eva", "Tom")
THINGS = ("plums", "books", "coins", "cards")
TASKS = {
    "+": (
        "{name} has {a} {things} and buys {b} more.",
        "{name} finds {a} {things} and then {b} more.",
    ),
    "-": (
        "{name} has {a} {things} and sells {b} of them.",
        "{name} finds {a} {things} and then loses {b} of them.",
    ),
}
QUESTION = " How many {things} are there?"
PIECE = r" ?[A-Za-z]+|\d|####|\s|[^\w\s]"
"""What becomes a token: a word with the space before it, a digit, a mark."""


def draw_task(generator: random.Random) -> dict[str, str]:
    """A question and its answer in GSM8K's form."""
    sign = generator.choice("+-")
    a, b = sorted(generator.choices(range(2, 13), k=2), reverse=True)
    text = generator.choice(TASKS[sign]) + QUESTION
    values = {"name": generator.choice(NAMES), "things": generator.choice(THINGS), "a": a, "b": b}
    result = a + b if sign == "+" else a - b
    return {"question": text.format(**values), "answer": f"{a}{sign}{b}={result}\n#### {result}"}


def draw_tasks(
    generator: random.Random, count: int, *, without: set[str]
) -> dict[str, dict[str, str]]:
    """Different tasks by their question, none of them in `without`."""
    tasks: dict[str, dict[str, str]] = {}
    while len(tasks) < count:
        task = draw_task(generator)
        if task["question"] not in without:
            tasks[task["question"]] = task
    return tasks


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, a digit or a mark, and nothing added to a prompt."""
    texts = [text + QUESTION for texts in TASKS.values() for text in texts]
    words = {
        piece
        for text in texts
        for name in NAMES
        for things in THINGS
        for piece in re.findall(PIECE, text.format(name=name, things=things, a=0, b=0))
    }
    pieces = sorted(words | set("0123456789+-=\n") | {"####", " "})
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *pieces])}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def make_policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights; heads of 32 because vLLM on CPU takes no smaller ones."""
    tokens: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **tokens,
    )
    policy = LlamaForCausalLM(config)
    policy.generation_config = GenerationConfig(**tokens)
    return policy


def make_data(folder: Path = DATA, *, seed: int = 0) -> None:
    """Write model, tokenizer and tasks into `folder`, unless it is there."""
    if folder.exists():
        return
    torch.manual_seed(seed)
    generator = random.Random(seed)
    held_out = draw_tasks(generator, NUM_EVAL, without=set())
    train = draw_tasks(generator, NUM_TRAIN, without=set(held_out))
    tokenizer = make_tokenizer()

    unfinished = folder.with_name(f"{folder.name}.unfinished")  # the folder is whole or not there
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for name, tasks in (("prompts", train), ("eval", held_out)):
        lines = "".join(json.dumps(task) + "\n" for task in tasks.values())
        (unfinished / f"{name}.jsonl").write_text(lines)
    tokenizer.save_pretrained(unfinished / "base")
    make_policy(tokenizer).save_pretrained(unfinished / "base")
    unfinished.rename(folder)


if __name__ == "__main__":
    make_data()
    print(f"{DATA} has base/, prompts.jsonl and eval.jsonl; remove it to make it anew.")
