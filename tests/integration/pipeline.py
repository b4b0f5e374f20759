"""Data for runs that learn from examples: sums whose answers are digits."""

import json
from pathlib import Path

from tests.tiny import tiny_policy


def write_examples(folder: Path) -> None:
    """A tiny policy, and files of examples and of pairs, some of them held out."""
    tiny_policy(folder / "model")
    write_rows(folder)


def write_rows(folder: Path) -> None:
    """Files of examples and of pairs, some of them held out."""
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "response": str(a + b),
            "chosen": str(a + b),
            "rejected": "x" * (1 + a % 3),
        }
        for a in range(8)
        for b in range(8)
    ]
    for name, part in (("train", rows[:48]), ("held_out", rows[48:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines)


def sft_values(folder: Path, **learner: object) -> dict:
    return {
        "recipe": "sft",
        "name": "sft",
        "num_steps": 6,
        "storage_path": f"{folder}/runs",
        "model": {"policy": f"{folder}/model"},
        "data": {
            "prompts": f"{folder}/train.jsonl",
            "label_key": "response",
            "max_prompt_tokens": 16,
            "max_response_tokens": 16,
        },
        "rollout": {"max_new_tokens": 8},
        "learner": {"lr": 5e-3, "batch_size": 16, "max_tokens_per_microbatch": 128, **learner},
        "eval": {
            "prompts": f"{folder}/held_out.jsonl",
            "function": "tests.integration.task:digit_share",
            "every": 3,
        },
        "checkpoint": {"every": 3},
    }


def dpo_values(folder: Path, **learner: object) -> dict:
    values = sft_values(folder, **learner)
    values |= {"recipe": "dpo", "name": "dpo", "dpo": {"beta": 0.3}}
    values["eval"]["pairs"] = values["eval"]["prompts"]
    return values


def reward_model_values(folder: Path, **learner: object) -> dict:
    values = sft_values(folder, **learner)
    del values["rollout"]
    values |= {"recipe": "reward_model", "name": "reward"}
    del values["data"]["label_key"]
    del values["eval"]["function"]
    return values


def rounds_values(folder: Path, recipe: str) -> dict:
    """Three rounds of 16 prompts with 4 samples each."""
    values = sft_values(folder, num_epochs=2, batch_size=8)
    del values["data"]["max_response_tokens"]
    values |= {"recipe": recipe, "name": recipe, "num_steps": 3}
    values["rollout"] |= {"prompts_per_step": 16, "samples_per_prompt": 4}
    values["reward"] = {"function": values["eval"].pop("function")}
    values["eval"]["every"] = values["checkpoint"]["every"] = 1
    return values
