"""Samples that GRPO needs to reach a pass@1 on arithmetic tasks: with a curriculum and without.

    python -m tests.benchmarks.curriculum [--seeds 0 1 2] [--only uniform curriculum] [--steps 40]
        [--rows 1024]

First: examples/arithmetic/make_data.py. Every run starts from the same SFT policy. Runs that are
finished are not run again, and others go on, so that several calls can share the work. Prints a
table.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from pathlib import Path
from typing import Any

import ray

from examples.quickstart.demo import read_metrics
from raypo import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from raypo.cluster.connect import connect

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic"
ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "curriculum": {"data.curriculum": {}},
}
LEVELS = (0.5, 0.55, 0.6, 0.65, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=256, help="prompts per step")
    parser.add_argument("--rows", type=int, default=3500, help="first rows of the training prompts")
    parser.add_argument("--runs", type=Path, default=Path("runs/curriculum"))
    arguments = parser.parse_args()
    arguments.runs = arguments.runs.absolute()
    config = SFTConfig.load(EXAMPLE / "sft.yaml", overrides={"storage_path": str(arguments.runs)})
    connect(config.cluster)
    SFTTrainer(config).fit()
    rows = (EXAMPLE / "data" / "prompts.jsonl").read_text().splitlines()[: arguments.rows]
    prompts = arguments.runs / f"prompts-{arguments.rows}.jsonl"
    prompts.write_text("\n".join(rows))
    print("arm         seed  " + "  ".join(f"pass@1 {level:g}" for level in LEVELS) + "  last")
    for seed in arguments.seeds:
        for arm in arguments.only:
            name = f"{arm}-{seed}-{arguments.prompts}x{arguments.steps}-{arguments.rows}"
            overrides = {
                "name": name,
                "seed": seed,
                "num_steps": arguments.steps,
                "storage_path": str(arguments.runs),
                "model.policy": str(arguments.runs / config.name / "policy"),
                "rollout.prompts_per_step": arguments.prompts,
                "ppo.minibatch_size": arguments.prompts * 4,
                "data.prompts": str(prompts),
                "eval.every": 4,
                "checkpoint.every": 8,
                **ARMS[arm],
            }
            PPOTrainer(PPOConfig.load(EXAMPLE / "grpo.yaml", overrides=overrides)).fit()
            print_row(arm, seed, read_metrics(arguments.runs / name))
    ray.shutdown()


def print_row(arm: str, seed: int, rows: list[dict[str, Any]]) -> None:
    """Print the samples taken when each level of the held-out pass@1 was first reached."""
    samples = list(accumulate(row["rollout/samples_sampled"] for row in rows))
    seen = [
        (count, row["eval/pass_at_1"])
        for count, row in zip(samples, rows, strict=True)
        if "eval/pass_at_1" in row
    ]
    reached = [next((n for n, rate in seen if rate >= level), None) for level in LEVELS]
    cells = "  ".join(f"{'-' if n is None else int(n):>10}" for n in reached)
    print(f"{arm:<11} {seed:>4}  {cells}  {seen[-1][1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
