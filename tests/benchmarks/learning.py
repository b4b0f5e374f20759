"""Learning of policies, on several seeds of the quickstart: sampling ahead against sync, the
recipes beside each other, and Muon beside AdamW at the same learning rates.

    python -m tests.benchmarks.learning modes|constant_rate|recipes|optimizers
        [--seeds 0 1 2] [--only none]

Every run starts from its seed's SFT policy, and is judged by the verifier on 256 held-out prompts,
four samples each. Runs that are finished are not run again. Prints a table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import ray
import transformers

from examples.quickstart.demo import HERE, Pipeline, fit, read_metrics
from raypo import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    IterativeDPOConfig,
    IterativeDPOTrainer,
    PPOTrainer,
    RejectionSamplingConfig,
    RejectionSamplingTrainer,
)
from raypo.cluster.connect import connect

DEDICATED = {"placement.mode": {"engine": "dedicated"}, "learner.cpus_per_worker": 1}
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"rollout.mode": "one_step_off"},
    **{
        f"async, {staleness}, {correction}": {
            "rollout.mode": "async",
            "rollout.max_staleness": staleness,
            **keys,
        }
        for staleness in (1, 4)
        for correction, keys in {
            "none": {},
            "tis": {"ppo.correction.kind": "tis"},
            "engine's log-probs": {"ppo.old_log_probs": "engine"},
        }.items()
    },
}
VERIFIER = {
    "model.reward": None,
    "reward.function": "examples/quickstart/reward.py:exact",
    "model.critic": None,
}
SAMPLES = 8192
"""Between two evaluations, in each recipe."""


def run_modes(pipeline: Pipeline, only: str, **more: Any) -> Iterator[tuple[str, Path]]:
    """The demo's PPO, sampled ahead in each way."""
    suffix = "-constant-rate" if more else ""
    for name, keys in MODES.items():
        if only in name:
            keys = {**DEDICATED, **keys, **more, "name": folder_of(name) + suffix}
            fit(PPOTrainer(pipeline.ppo_config(**keys)))
            yield name, pipeline.runs / (folder_of(name) + suffix)


def run_constant_rate(pipeline: Pipeline, only: str) -> Iterator[tuple[str, Path]]:
    """The same, but the last updates are as large as the first."""
    return run_modes(pipeline, only, **{"learner.lr_schedule": "constant"})


def run_recipes(pipeline: Pipeline, only: str) -> Iterator[tuple[str, Path]]:
    """PPO and the recipes that go by rounds, 32,768 samples each (distillation: 16,384); DPO on the
    demo's pairs."""
    paths = {
        "seed": pipeline.seed,
        "storage_path": str(pipeline.runs),
        "model.policy": str(pipeline.sft / "policy"),
        "data.prompts": str(pipeline.data / "prompts.jsonl"),
        "eval.prompts": str(pipeline.data / "eval.jsonl"),
    }
    longer = {"num_steps": 64, "eval.every": 16}
    for name, keys in (("PPO, reward model", {}), ("PPO, verifier", VERIFIER)):
        fit(PPOTrainer(pipeline.ppo_config(**longer, **keys, name=folder_of(name))))
        yield name, pipeline.runs / folder_of(name)
    on_pairs = paths | {
        "data.prompts": str(pipeline.data / "pairs.jsonl"),
        "eval.pairs": str(pipeline.data / "eval_pairs.jsonl"),
    }
    offline = DPOConfig.load(HERE / "dpo.yaml", overrides=on_pairs)
    fit(DPOTrainer(offline))
    yield "DPO", pipeline.runs / offline.name
    best = RejectionSamplingConfig.load(HERE / "rejection_sampling.yaml", overrides=paths)
    fit(RejectionSamplingTrainer(best))
    yield "rejection sampling", pipeline.runs / best.name
    pairs = IterativeDPOConfig.load(HERE / "iterative_dpo.yaml", overrides=paths)
    fit(IterativeDPOTrainer(pairs))
    yield "iterative DPO", pipeline.runs / pairs.name
    teacher = {"model.teacher": str(pipeline.runs / best.name / "policy")}
    teacher |= {"num_steps": 64, "eval.every": 32, "name": "learning-distillation"}
    told = DistillationConfig.load(HERE / "distillation.yaml", overrides={**paths, **teacher})
    fit(DistillationTrainer(told))
    yield "distillation", pipeline.runs / told.name


def run_optimizers(pipeline: Pipeline, only: str) -> Iterator[tuple[str, Path]]:
    """The demo's PPO with each optimizer, the same steps and learning rates."""
    for name in ("adamw", "muon"):
        if only in name:
            keys = {"name": folder_of(name), "learner.optimizer": name}
            fit(PPOTrainer(pipeline.ppo_config(**keys)))
            yield name, pipeline.runs / folder_of(name)


def folder_of(name: str) -> str:
    return "learning-" + name.replace(", ", "-").replace(" ", "-").replace("'", "")


def scores(folder: Path) -> dict[int, float]:
    """The verifier's score after each evaluation, by samples (by steps where nothing is sampled);
    0: before the first update."""
    rows = read_metrics(folder)
    sampled = accumulate(row.get("rollout/samples_sampled", 0) for row in rows)
    found = {0: rows[0]["eval/initial_score_mean"]}
    for samples, row in zip(sampled, rows, strict=True):
        if "eval/score_mean" in row:
            found[int(samples) or int(row["step"])] = row["eval/score_mean"]
    return found


def seconds(folder: Path) -> float:
    """Of all steps; held-out evaluations and checkpoints are left out."""
    names = ("time/held_out_s", "time/checkpoint_s")
    rows = read_metrics(folder)
    return sum(row["time/step_s"] - sum(row.get(name, 0.0) for name in names) for row in rows)


def staleness(folder: Path) -> str:
    rows = read_metrics(folder)
    if "rollout/staleness_mean" not in rows[0]:
        return ""
    return f"{mean(row['rollout/staleness_mean'] for row in rows):.1f}"


KINDS = {
    "modes": run_modes,
    "constant_rate": run_constant_rate,
    "recipes": run_recipes,
    "optimizers": run_optimizers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", default="", help="modes whose name contains this")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    folders: dict[str, list[Path]] = {}
    for seed in arguments.seeds:
        pipeline = Pipeline.of_seed(seed)
        connect(pipeline.sft_config().cluster)
        pipeline.run_to_reward_model()
        for name, folder in KINDS[arguments.what](pipeline, arguments.only):
            folders.setdefault(name, []).append(folder)
            found = ", ".join(f"{each}: {score:.1%}" for each, score in scores(folder).items())
            print(f"MEASURED seed {seed}, {name}: {found}; {seconds(folder):.0f} s", flush=True)
        ray.shutdown()
    print(
        "\n| | staleness | KL | "
        + "seconds | "
        + " | ".join(map(str, arguments.seeds))
        + " | mean |"
    )
    for name, each in folders.items():
        last = [list(scores(folder).values())[-1] for folder in each]
        kl = [read_metrics(folder)[-1].get("kl/ref_response_mean") for folder in each]
        shown = mean(value for value in kl if value is not None) if None not in kl else float("nan")
        cells = " | ".join(f"{score:.1%}" for score in last)
        took = mean(map(seconds, each))
        print(
            f"| {name} | {staleness(each[0])} | {shown:.2f} | {took:.0f} | {cells} | "
            f"{mean(last):.1%} |"
        )


if __name__ == "__main__":
    main()
