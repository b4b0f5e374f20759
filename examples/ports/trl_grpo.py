"""A GRPO script of TRL, ported: the reward functions are unchanged, the numbers count globally.

The keys marked "TRL's default" are what the script did without saying so.

The script was (one process):

    args = GRPOConfig(
        output_dir="runs/ported-trl",
        num_generations=4,
        per_device_train_batch_size=32,  # responses
        gradient_accumulation_steps=4,   # 128 responses an update: 32 prompts
        max_completion_length=6,
        learning_rate=3e-4,
        beta=0.04,
        max_steps=10,
    )
    GRPOTrainer("runs/quickstart-sft/policy", [exact, brevity], args, train_dataset=dataset).train()
"""

from __future__ import annotations

from typing import Any

from raypo import GRPOTrainer, StepView


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def brevity(completions: list[str], **columns: Any) -> list[float]:
    return [-0.01 * len(text) for text in completions]


def longest(step: StepView) -> dict[str, float]:
    return {"mine/longest": max(len(each.response) for each in step.rollouts)}


def main() -> None:
    trainer = GRPOTrainer(
        model="runs/quickstart-sft/policy",
        reward_funcs=[exact, brevity],
        train_dataset="examples/quickstart/data/prompts.jsonl",
        callbacks=[longest],  # in place of a TrainerCallback
        args={
            "name": "ported-trl",
            "num_steps": 10,
            "data.max_prompt_tokens": 8,
            "rollout.prompts_per_step": 32,
            "rollout.samples_per_prompt": 4,
            "rollout.max_new_tokens": 6,
            "ppo.minibatch_size": 128,  # responses
            "ppo.aggregation": "token_mean",  # TRL's default: loss_type="dapo"
            "ppo.kl.coef": 0.04,
            "learner.policy_lr": 3.0e-4,
            "learner.lr_schedule": "linear",  # TRL's default
        },
    )
    print(trainer.fit().metrics_dataframe)


if __name__ == "__main__":
    main()
