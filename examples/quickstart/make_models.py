"""Makes all that the quickstart needs, from nothing and without a network, in half a minute.

The task is to sort four digits: `5031=` -> `0135`. Written to examples/quickstart/data/:
prompts.jsonl and eval.jsonl (columns prompt and answer) and policy/, a Llama of 83 thousand
parameters that supervised fine-tuning (SFT) has taught to sort, but not well. PPO does the rest.
"""

import json
import os
import random
import shutil
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

DATA = Path(__file__).parent / "data"
NUM_DIGITS = 4
NUM_TRAIN, NUM_EVAL = 4096, 256
SFT_STEPS, SFT_BATCH, SFT_LR = 45, 256, 5e-3
Example = tuple[str, str]  # prompt, answer


def answer_of(prompt: str) -> str:
    """The answer that earns a reward: the digits of `5031=` in order, `0135`."""
    return "".join(sorted(prompt.removesuffix("=")))


def draw_examples(generator: random.Random, count: int, *, without: set[str]) -> list[Example]:
    """Different random prompts with their answers, none of them in `without`."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompt = "".join(generator.choices("0123456789", k=NUM_DIGITS)) + "="
        if prompt not in without:
            prompts[prompt] = None
    return [(prompt, answer_of(prompt)) for prompt in prompts]


def write_jsonl(path: Path, examples: list[Example]) -> None:
    lines = (json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in examples)
    path.write_text("\n".join(lines) + "\n")


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
    tokens = {
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


def encode(tokenizer: PreTrainedTokenizerFast, examples: list[Example]) -> Tensor:
    """Prompt, answer and end of sequence, [B, L]; all examples have the same length."""
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in examples]
    return torch.tensor(tokenizer(texts).input_ids)


def sft_step(policy: LlamaForCausalLM, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
    """One update on the likelihood of the answers."""
    labels = ids.clone()
    labels[:, : NUM_DIGITS + 1] = -100  # the prompt is given
    policy(ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def sampled_score(
    policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example]
) -> float:
    """Share of right answers when each prompt is answered once, at temperature 1."""
    ids = encode(tokenizer, examples)[:, : NUM_DIGITS + 1]
    output = policy.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=6
    )
    responses = tokenizer.batch_decode(output[:, NUM_DIGITS + 1 :], skip_special_tokens=True)
    right = sum(r == answer for r, (_, answer) in zip(responses, examples, strict=True))
    return right / len(examples)


def fine_tune(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    generator: random.Random,
    *,
    without: set[str],
) -> None:
    """SFT on fresh examples, stopped long before the policy is good."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=SFT_LR)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, SFT_STEPS)
    for _ in range(SFT_STEPS):
        batch = draw_examples(generator, SFT_BATCH, without=without)
        sft_step(policy, optimizer, encode(tokenizer, batch))
        schedule.step()


def main() -> None:
    if DATA.exists():
        print(f"{DATA} is there already; remove it to make it anew.")
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saves DeepSpeed a warning
    transformers.logging.disable_progress_bar()
    start = time.monotonic()
    torch.set_num_threads(1)  # more make so small a model no faster
    torch.manual_seed(0)
    generator = random.Random(0)
    held_out = draw_examples(generator, NUM_EVAL, without=set())
    held_out_prompts = {prompt for prompt, _ in held_out}
    train = draw_examples(generator, NUM_TRAIN, without=held_out_prompts)

    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer)
    fine_tune(policy, tokenizer, generator, without=held_out_prompts)
    score = sampled_score(policy, tokenizer, held_out)

    unfinished = DATA.with_name("data.unfinished")  # DATA exists only when it is whole
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    write_jsonl(unfinished / "prompts.jsonl", train)
    write_jsonl(unfinished / "eval.jsonl", held_out)
    tokenizer.save_pretrained(unfinished / "policy")
    policy.save_pretrained(unfinished / "policy")
    unfinished.rename(DATA)
    print(
        f"SFT policy: {score:.0%} of {NUM_EVAL} held-out prompts answered right at temperature 1 "
        f"({policy.num_parameters():,} parameters, {time.monotonic() - start:.0f} s) -> {DATA}"
    )


if __name__ == "__main__":
    main()
