"""Makes what the quickstart starts from, without a network: a model, a tokenizer, prompts.

python -m examples.quickstart.make_data

The task is to sort four digits: `5031=` -> `0135`. Written to examples/quickstart/data/: `base/`, a
Llama of 83 thousand parameters with random weights; `prompts.jsonl` and, held out from all
training, `eval.jsonl`, both with the columns prompt and answer.
"""

import json
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(os.path.relpath(Path(__file__).parent)) / "data"
"""As `raypo train examples/quickstart/sft.yaml` names it, whose runs the demo shares."""
NUM_DIGITS = 4
NUM_TRAIN, NUM_EVAL = 8000, 256
Example = tuple[str, str]  # prompt, answer


def answer_of(prompt: str) -> str:
    """The only right answer: the digits of `5031=` in order, `0135`."""
    return "".join(sorted(prompt.removesuffix("=")))


def draw_examples(generator: random.Random, count: int, *, without: set[str]) -> list[Example]:
    """Different random prompts with their answers, none of them in `without`."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompt = "".join(generator.choices("0123456789", k=NUM_DIGITS)) + "="
        if prompt not in without:
            prompts[prompt] = None
    return [(prompt, answer_of(prompt)) for prompt in prompts]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_examples(path: Path, examples: list[Example]) -> None:
    write_jsonl(path, ({"prompt": prompt, "answer": answer} for prompt, answer in examples))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and nothing added to a prompt."""
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *"0123456789="])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
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
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        dtype=torch.float32,
        **tokens,
    )
    policy = LlamaForCausalLM(config)
    policy.generation_config = GenerationConfig(**tokens)
    return policy


def make_data(folder: Path = DATA, *, seed: int = 0) -> None:
    """Write model, tokenizer and prompts into `folder`, unless it is there."""
    if folder.exists():
        return
    torch.manual_seed(seed)
    generator = random.Random(seed)
    held_out = draw_examples(generator, NUM_EVAL, without=set())
    train = draw_examples(generator, NUM_TRAIN, without={prompt for prompt, _ in held_out})
    tokenizer = make_tokenizer()

    unfinished = folder.with_name(f"{folder.name}.unfinished")  # the folder is whole or not there
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_examples(unfinished / "prompts.jsonl", train)
    write_examples(unfinished / "eval.jsonl", held_out)
    tokenizer.save_pretrained(unfinished / "base")
    make_policy(tokenizer).save_pretrained(unfinished / "base")
    unfinished.rename(folder)


if __name__ == "__main__":
    make_data()
    print(f"{DATA} has base/, prompts.jsonl and eval.jsonl; remove it to make it anew.")
