"""Small runs with a planted sickness, and healthy ones of many recipes and seeds.

What the sick ones and one of the healthy ones measured is in health_runs.json.gz, which unit tests
read. To record them again, all or some, on a machine with nothing else to do:

    python -m tests.health_runs [NAME...]
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from raypo.health.rules import findings
from raypo.storage.run_files import RunFiles
from raypo.types import Rollout
from tests.small_run import SUMS, TorchEngine, half_taught_policy, right, run_small, sums

RECORDED = Path(__file__).with_name("health_runs.json.gz")
_CONFIG = ("ppo", "rollout", "reward", "learner", "placement", "num_steps")
GRPO: dict[str, Any] = {"preset": "grpo"}
FREE: dict[str, Any] = GRPO | {"kl": {"coef": 1e-6, "placement": "loss"}}
FAST: dict[str, Any] = {"policy_lr": 1e-3}


class Sick(NamedTuple):
    """A run with one sickness."""

    rule: str
    options: dict[str, Any]
    onset: int = 1
    """First step that has the sickness. If it grows: the first whose figure is beyond the limit."""
    steps: int = 8


def stale(engine: TorchEngine, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Push no more after step 3, but say so."""
    engine.push(weights if version < 4 else {}, version)


def partly(engine: TorchEngine, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Push every second tensor after step 3."""
    names = list(weights)[:: 1 if version < 4 else 2]
    engine.push({name: weights[name] for name in names}, version)


def coarse(engine: TorchEngine, weights: Mapping[str, torch.Tensor], version: int) -> None:
    """Push weights of which 3 bits are left."""
    rounded = {}
    for name, tensor in weights.items():
        scale = tensor.detach().abs().max() / 4
        rounded[name] = (tensor.detach() / scale).round() * scale
    engine.push(rounded, version)


class Behind:
    """Pushes weights that are several versions old, and says so."""

    def __init__(self, versions: int) -> None:
        self.versions, self.kept = versions, list[dict[str, torch.Tensor]]()

    def __call__(
        self, engine: TorchEngine, weights: Mapping[str, torch.Tensor], version: int
    ) -> None:
        self.kept.append({name: tensor.detach().clone() for name, tensor in weights.items()})
        if version > self.versions:
            engine.push(self.kept.pop(0), version - self.versions)


class Leaking:
    """A reward function that keeps 10 MB of each step."""

    def __init__(self) -> None:
        self.kept: list[bytearray] = []

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        self.kept.append(bytearray(b"x" * 10_000_000))
        return right(rollouts)


def slow(rollouts: list[Rollout]) -> list[float]:
    time.sleep(2.0)
    return right(rollouts)


def digits(rollouts: list[Rollout]) -> list[float]:
    return [min(sum(c.isdigit() for c in rollout.response), 6) / 6 for rollout in rollouts]


def long(rollouts: list[Rollout]) -> list[float]:
    return [len(rollout.response_ids) / 16 for rollout in rollouts]


def wrong(rollouts: list[Rollout]) -> list[float]:
    return [1.0 - score for score in right(rollouts)]


def nine(rollouts: list[Rollout]) -> list[float]:
    """A score for 9, whatever the sum is, at every second prompt."""
    return [float(r.response == "9" and r.prompt_index % 2) for r in rollouts]


def nothing(rollouts: list[Rollout]) -> list[float]:
    return [0.0] * len(rollouts)


def by_prompt(rollouts: list[Rollout]) -> list[float]:
    """A score that does not depend on the response."""
    return [float(rollout.prompt_index % 2) for rollout in rollouts]


def without_header() -> list[dict[str, Any]]:
    """Prompts that were rendered without the header of the answer."""
    return [{"prompt": f"user: {a}+{b}=\n", "label": str(a + b)} for a, b in SUMS[:66]]


SICK = {
    "stale": Sick("stale_weights", {"push": stale}, onset=5, steps=9),
    "partly_pushed": Sick("stale_weights", {"push": partly}, onset=5, steps=9),
    "coarse_engine": Sick("engine_mismatch", {"push": coarse}, steps=4),
    "behind": Sick(
        "off_policy_drift", {"push": Behind(6), "learner": FAST, "ppo": GRPO}, onset=2, steps=6
    ),
    "rate_high": Sick("learning_rate_high", {"learner": {"policy_lr": 0.05}}, steps=6),
    "rate_low": Sick("learning_rate_low", {"learner": {"policy_lr": 1e-8}}, steps=22),
    "no_kl": Sick(
        "kl_runaway", {"reward": digits, "ppo": FREE, "learner": FAST}, onset=5, steps=20
    ),
    "one_answer": Sick(
        "entropy_collapse", {"reward": nine, "ppo": FREE, "learner": FAST}, onset=26, steps=30
    ),
    "blind": Sick("blind_critic", {"learner": {"critic_lr": 1e-9}}, steps=21),
    "of_prompt": Sick("no_advantage", {"reward": by_prompt, "ppo": {"preset": "dr_grpo"}}, steps=4),
    "constant": Sick("constant_reward", {"reward": nothing}, steps=4),
    "copies": Sick(
        "duplicated_prompts",
        {"rows": sums(SUMS[:40] + SUMS[:20]), "held_out": sums(SUMS[60:])},
        steps=1,
    ),
    "known_held_out": Sick(
        "held_out_in_training", {"rows": sums(SUMS[:60]), "held_out": sums(SUMS[55:80])}, steps=1
    ),
    "template": Sick(
        "wrong_template",
        {"rows": without_header(), "rollout": {"max_new_tokens": 16}},
        steps=4,
    ),
    "no_end": Sick("end_never_learned", {"stops": ()}, steps=7),
    "cut": Sick("truncation_bias", {"rollout": {"max_new_tokens": 2}}, steps=4),
    "long": Sick(
        "length_exploited",
        {
            "reward": long,
            "ppo": FREE,
            "learner": FAST,
            "rollout": {"max_new_tokens": 16, "temperature": 1.4},
        },
        onset=4,
        steps=24,
    ),
    "dying": Sick(
        "policy_dies",
        {"reward": wrong, "ppo": FREE, "learner": FAST, "eval": {"every": 2}},
        onset=4,
        steps=16,
    ),
    "leaking": Sick("memory_leak", {"reward": Leaking()}, steps=32),
    "slow_reward": Sick("slow_reward", {"reward": slow}, steps=6),
}
"""Runs with a planted sickness, by name."""

HEALTHY: dict[str, dict[str, Any]] = {
    f"{preset}-{seed}": {"seed": seed, "ppo": {"preset": preset} | more}
    for seed, (preset, more) in enumerate(
        {
            "ppo": {},
            "grpo": {},
            "dr_grpo": {},
            "rloo": {},
            "reinforce++": {},
            "reinforce++_baseline": {},
            "dapo": {},
            "gmpo": {},
            "cispo": {},
            "sapo": {},
            "opo": {},
            "dppo": {},
            "vespo": {},
            "pass_at_k": {},
        }.items()
    )
}
HEALTHY |= {
    "ppo-epochs": {"seed": 14, "ppo": {"preset": "ppo", "num_epochs": 2}},
    "ppo-gamma": {"seed": 15, "ppo": {"gae_lambda": 1.0, "kl": {"controller": "adaptive"}}},
    "grpo-warm": {"seed": 16, "ppo": GRPO, "rollout": {"temperature": 1.2}},
    "grpo-eight": {"seed": 17, "ppo": GRPO, "rollout": {"samples_per_prompt": 8}},
    "grpo-entropy": {"seed": 18, "ppo": GRPO | {"entropy_coef": 0.01}},
    "grpo-behind": {"seed": 19, "ppo": GRPO, "push": "behind"},
}
"""Healthy runs, by name."""
HEALTHY_STEPS = 21


def run_of(folder: Path, policy: Path, name: str) -> RunFiles:
    """Run one of SICK or HEALTHY."""
    if name in SICK:
        sick = SICK[name]
        return run_small(folder, policy, name, num_steps=sick.steps, **sick.options)
    options = dict(HEALTHY[name])
    options["rollout"] = {"prompts_per_step": 12, "max_new_tokens": 6} | options.get("rollout", {})
    options["ppo"] = {"minibatch_size": 24} | options["ppo"]
    if options.pop("push", None):
        options["push"] = Behind(1)
    return run_small(folder, policy, name, num_steps=HEALTHY_STEPS, **options)


def recorded() -> dict[str, dict[str, Any]]:
    """Return config and rows of each recorded run."""
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


def record(names: list[str]) -> None:
    runs = recorded() if names and RECORDED.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        policy = half_taught_policy(folder / "policy")
        for name in names or [*SICK, *HEALTHY]:
            files = run_of(folder, policy, name)
            config, rows = files.config() or {}, files.metrics()
            runs[name] = {
                "config": {key: config[key] for key in _CONFIG},
                "rows": [{k: float(f"{v:.5g}") for k, v in row.items()} for row in rows],
            }
            found = [(finding.rule, finding.step) for finding in findings(rows, config)]
            print(name, SICK[name].rule if name in SICK else "", found, flush=True)
            if "-v" in sys.argv or name in HEALTHY:
                print("  ", rows[-1].get("rollout/score_mean"), rows[-1].get("eval/score_mean"))
            text = json.dumps(runs).replace("NaN", "null")
            RECORDED.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    record([name for name in sys.argv[1:] if not name.startswith("-")])
