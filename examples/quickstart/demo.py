"""The whole of RLHF on a tiny model: SFT, a reward model, PPO with a critic, and a verdict.

python -m examples.quickstart.demo [--seed N]      or: make demo

All stages run in one Ray session. A stage that is finished is not run again, and one that was
interrupted resumes. At the end the conditions are printed with what was measured; the exit status
is 1 if one of them is not met.
"""

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
import torch
import transformers
from ray.train.torch import TorchTrainer

from raypo import (
    PPOConfig,
    PPOTrainer,
    RewardModelConfig,
    RewardModelTrainer,
    SFTConfig,
    SFTTrainer,
)
from raypo.checks.resume_checks import is_finished
from raypo.cluster.connect import connect
from raypo.storage.run_files import RunFiles

from .make_data import DATA, make_data
from .make_pairs import make_pairs

HERE = DATA.parent
MIN_SFT_SCORE = 0.25
MAX_SFT_CHANGE = 0.05
"""Between the last three evaluations of SFT: what it can still learn is little."""
MIN_PAIR_ACCURACY = 0.97
MIN_GAIN = 0.20
MAX_KL = 2.5
"""Nats per response between the aligned policy and the SFT policy."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Pipeline:
    """Where the stages of one seed read and write."""

    seed: int
    data: Path
    runs: Path

    @classmethod
    def of_seed(cls, seed: int) -> Self:
        """Seed 0 uses the folders that the YAML files name."""
        if seed == 0:
            return cls(seed, DATA, Path("runs"))
        return cls(seed, Path(f"runs/seed_{seed}/data"), Path(f"runs/seed_{seed}"))

    @property
    def sft(self) -> Path:
        return self.runs / "quickstart-sft"

    @property
    def reward_model(self) -> Path:
        return self.runs / "quickstart-reward-model"

    @property
    def ppo(self) -> Path:
        return self.runs / "quickstart"

    def sft_config(self, **overrides: Any) -> SFTConfig:
        paths = {
            "model.policy": self.data / "base",
            "data.prompts": self.data / "prompts.jsonl",
            "eval.prompts": self.data / "eval.jsonl",
        }
        return SFTConfig.load(HERE / "sft.yaml", overrides=self._overrides(paths) | overrides)

    def reward_model_config(self, **overrides: Any) -> RewardModelConfig:
        paths = {
            "model.policy": self.sft / "policy",
            "data.prompts": self.data / "pairs.jsonl",
            "eval.prompts": self.data / "eval_pairs.jsonl",
        }
        overrides = self._overrides(paths) | overrides
        return RewardModelConfig.load(HERE / "reward_model.yaml", overrides=overrides)

    def hasty_reward_model_config(self) -> RewardModelConfig:
        """A reward model of a tenth of the steps, which a policy can game: sweeps/kl_coef.yaml."""
        return self.reward_model_config(name="quickstart-hasty-reward-model", num_steps=60)

    def ppo_config(self, **overrides: Any) -> PPOConfig:
        paths = {
            "model.policy": self.sft / "policy",
            "model.reward": self.reward_model / "reward_model",
            "model.critic": self.reward_model / "reward_model",
            "data.prompts": self.data / "prompts.jsonl",
            "eval.prompts": self.data / "eval.jsonl",
        }
        return PPOConfig.load(HERE / "ppo.yaml", overrides=self._overrides(paths) | overrides)

    def _overrides(self, paths: dict[str, Path]) -> dict[str, Any]:
        texts = {key: str(path) for key, path in paths.items()}
        return {"seed": self.seed, "storage_path": str(self.runs), **texts}

    def is_finished(self) -> bool:
        """Whether there is nothing left to run."""
        stages = (
            self.sft_config(),
            self.reward_model_config(),
            self.hasty_reward_model_config(),
            self.ppo_config(),
        )
        return all(is_finished(RunFiles(each.storage_path, each.name), each) for each in stages)

    def run_to_pairs(self) -> None:
        """Data, SFT, pairs: what a reward model starts from."""
        make_data(self.data, seed=self.seed)
        fit(SFTTrainer(self.sft_config()))
        make_pairs(self.data, self.sft / "policy", seed=self.seed)

    def run_to_reward_model(self) -> None:
        """And the reward model: what PPO starts from."""
        self.run_to_pairs()
        fit(RewardModelTrainer(self.reward_model_config()))

    def run(self) -> None:
        """All stages, and the reward model of the sweep over the KL coefficient."""
        self.run_to_reward_model()
        fit(RewardModelTrainer(self.hasty_reward_model_config()))
        fit(PPOTrainer(self.ppo_config()))

    def conditions(self) -> "list[Condition]":
        """What must hold, from the metrics of the three runs."""
        return conditions(*map(read_metrics, (self.sft, self.reward_model, self.ppo)))


def fit(trainer: TorchTrainer) -> None:
    """Run a stage to its end; one that was interrupted ends the demo, and the next call resumes."""
    result = trainer.fit()
    if (result.return_value or {}).get("status") == "interrupted":
        raise SystemExit(INTERRUPTED)


@dataclass(frozen=True)
class Condition:
    """Something that must hold, and what was measured."""

    name: str
    measured: str
    is_met: bool


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A run's metrics by step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def values_of(rows: Iterable[dict[str, Any]], name: str) -> list[float]:
    """A metric over the steps that have it; first the value before the first update, if any."""
    initial = name.replace("eval/", "eval/initial_")
    first = [row[initial] for row in rows if initial != name and initial in row]
    return first + [row[name] for row in rows if name in row]


def conditions(
    sft: Sequence[dict[str, Any]],
    reward_model: Sequence[dict[str, Any]],
    ppo: Sequence[dict[str, Any]],
) -> list[Condition]:
    """What must hold, from the metrics of the three runs."""
    sft_scores = values_of(sft, "eval/score_mean")
    change = max(sft_scores[-3:]) - min(sft_scores[-3:])
    accuracy = values_of(reward_model, "eval/accuracy")[-1]
    verifier = values_of(ppo, "eval/score_mean")
    gain = verifier[-1] - verifier[0]
    judged = values_of(ppo, "rollout/score_mean")
    kl = ppo[-1]["kl/ref_response_mean"]
    return [
        Condition(
            f"SFT answers at least {MIN_SFT_SCORE:.0%} of held-out prompts right",
            f"{sft_scores[-1]:.1%}",
            sft_scores[-1] >= MIN_SFT_SCORE,
        ),
        Condition(
            f"SFT is flat: last three evaluations within {100 * MAX_SFT_CHANGE:.0f} points",
            f"{100 * change:.1f} points",
            change <= MAX_SFT_CHANGE,
        ),
        Condition(
            f"reward model orders at least {MIN_PAIR_ACCURACY:.0%} of held-out pairs",
            f"{accuracy:.1%}",
            accuracy >= MIN_PAIR_ACCURACY,
        ),
        Condition(
            "PPO raises the reward model's score",
            f"{judged[0]:+.2f} -> {judged[-1]:+.2f}",
            judged[-1] > judged[0],
        ),
        Condition(
            f"PPO raises the verifier's held-out score by at least {100 * MIN_GAIN:.0f} points",
            f"{verifier[0]:.1%} -> {verifier[-1]:.1%} ({100 * gain:+.1f})",
            gain >= MIN_GAIN,
        ),
        Condition(
            f"KL to the SFT policy is at most {MAX_KL:g} nats per response",
            f"{kl:.2f}",
            kl <= MAX_KL,
        ),
    ]


def table(results: list[Condition]) -> str:
    """The conditions as lines of text."""
    width = max(len(result.name) for result in results)
    return "\n".join(
        f"{'ok    ' if result.is_met else 'FAILED'}  {result.name:{width}}  {result.measured}"
        for result in results
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of data, models and sampling")
    pipeline = Pipeline.of_seed(parser.parse_args().seed)
    start = time.monotonic()
    if not torch.cuda.is_available():  # Ray's workers get this too
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saves DeepSpeed a warning
    transformers.logging.disable_progress_bar()
    if not pipeline.is_finished():
        connect(pipeline.sft_config().cluster)
    try:
        pipeline.run()
    finally:
        ray.shutdown()
    results = pipeline.conditions()
    print(f"\nThe pipeline of seed {pipeline.seed}, {time.monotonic() - start:.0f} s:")
    print(table(results))
    return 0 if all(result.is_met for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
