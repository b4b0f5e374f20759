"""Makes pairs for the reward model: sampled from the SFT policy, labelled by the verifier.

python -m examples.quickstart.make_pairs

Written to examples/quickstart/data/: `pairs.jsonl` from the training prompts and `eval_pairs.jsonl`
from the held-out ones, with the columns prompt, chosen (a right answer) and rejected (a wrong one).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .make_data import DATA, NUM_DIGITS, Example, write_jsonl

SFT_POLICY = Path("runs/quickstart-sft/policy")
NUM_SAMPLES = 8
MAX_PAIRS = 3
"""Most pairs of one prompt: different wrong answers against a right one."""
BATCH_PROMPTS = 512


def pairs_of(example: Example, responses: list[str]) -> Iterator[dict[str, str]]:
    """Pairs of a prompt's responses; none where all are right, or all wrong."""
    prompt, answer = example
    if answer not in responses:
        return
    wrong = list(dict.fromkeys(response for response in responses if response != answer))
    for rejected in wrong[:MAX_PAIRS]:
        yield {"prompt": prompt, "chosen": answer, "rejected": rejected}


@torch.inference_mode()
def sample(
    policy: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    num_samples: int,
) -> list[list[str]]:
    """`num_samples` responses to each prompt at temperature 1; prompts have the same length."""
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
    ids = policy.generate(
        **inputs,
        do_sample=True,
        top_k=0,
        num_return_sequences=num_samples,
        max_new_tokens=NUM_DIGITS + 2,
    )
    texts = tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]


def make_pairs(
    data: Path = DATA,
    sft_policy: Path = SFT_POLICY,
    *,
    seed: int = 0,
    num_samples: int = NUM_SAMPLES,
) -> None:
    """Write both files of pairs into `data`, unless they are there."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(sft_policy).eval()
    tokenizer = AutoTokenizer.from_pretrained(sft_policy)
    for source, target in (("eval", "eval_pairs"), ("prompts", "pairs")):
        path = data / f"{target}.jsonl"
        if path.exists():
            continue
        rows = map(json.loads, (data / f"{source}.jsonl").read_text().splitlines())
        examples = [(row["prompt"], row["answer"]) for row in rows]
        pairs: list[dict[str, str]] = []
        for start in range(0, len(examples), BATCH_PROMPTS):
            batch = examples[start : start + BATCH_PROMPTS]
            prompts = [prompt for prompt, _ in batch]
            responses = sample(policy, tokenizer, prompts, num_samples=num_samples)
            for example, of_prompt in zip(batch, responses, strict=True):
                pairs.extend(pairs_of(example, of_prompt))
        unfinished = path.with_suffix(".unfinished")
        write_jsonl(unfinished, pairs)
        unfinished.rename(path)
        print(f"{len(pairs)} pairs -> {path}")


if __name__ == "__main__":
    make_pairs()
