"""Makes what the tool user starts from, without a network: a model, a tokenizer, chats to learn.

python -m examples.calculator.make_data

Written to examples/calculator/data/: `base/`, a Llama of 331 thousand random weights;
`conversations.jsonl`, in which sums and products are answered at once or after a call of the
calculator, as a coin falls; `prompts.jsonl` and, drawn apart, `eval.jsonl`, with the columns prompt
and answer.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
NUM_TASKS, NUM_HELD_OUT = 6000, 256
CALLS = 0.4  # share of the conversations that call the calculator, whatever the task
OPEN = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CLOSE = '"}}</tool_call>'
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content }}<eos>"
    "{% elif m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>"
    "{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def draw_task(generator: random.Random) -> str:
    """A sum of two digits, of which there are a hundred to know, or a product that nobody knows."""
    if generator.random() < 0.5:
        return f"{generator.randint(0, 9)}+{generator.randint(0, 9)}"
    return f"{generator.randint(10, 99)}*{generator.randint(10, 99)}"


def question(task: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{task}="}]


def conversation(task: str, *, calls: bool) -> list[dict[str, str]]:
    """What the policy is to imitate."""
    answer = {"role": "assistant", "content": str(eval(task))}
    call = [
        {"role": "assistant", "content": f"{OPEN}{task}{CLOSE}"},
        {"role": "tool", "content": str(eval(task))},
    ]
    return [*question(task), *(call if calls else ()), answer]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, and one for each piece of a call that is always the same."""
    tokens = ["<pad>", "<bos>", "<eos>", *"0123456789+*="]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.add_tokens([OPEN, CLOSE, "<tool_response>", "</tool_response>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_policy(num_tokens: int) -> LlamaForCausalLM:
    special: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=num_tokens,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,  # heads of 32: vLLM on CPU takes no smaller ones
            max_position_embeddings=64,
            tie_word_embeddings=True,
            dtype=torch.float32,
            **special,
        )
    )
    policy.generation_config = GenerationConfig(**special)
    return policy


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path = DATA) -> None:
    """Write model, tokenizer, conversations and prompts."""
    torch.manual_seed(0)
    generator = random.Random(0)
    tokenizer = make_tokenizer()
    make_policy(len(tokenizer)).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    tasks = [draw_task(generator) for _ in range(NUM_TASKS)]
    held_out, train = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:]
    write_jsonl(
        folder / "conversations.jsonl",
        ({"messages": conversation(t, calls=generator.random() < CALLS)} for t in train),
    )
    for name, part in (("prompts", train), ("eval", held_out)):
        rows = ({"prompt": question(task), "answer": str(eval(task))} for task in part)
        write_jsonl(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
