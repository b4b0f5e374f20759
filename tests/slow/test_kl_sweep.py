"""sweeps/kl_coef.yaml: the verifier picks a coefficient between the ends, for half the price."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from examples.quickstart.demo import Pipeline, fit, values_of
from raypo import RewardModelTrainer
from raypo.cluster.connect import connect
from raypo.config import ClusterSection
from tests.integration.task import REPOSITORY, raypo, read_metrics

NUM_CORES = 2
"""That a run of the demo's PPO holds."""
KILL_AFTER = 3
"""Ended trials."""


def prepared(folder: Path, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Models for a seed; the sweep as in its file, and its base, with this folder's paths."""
    pipeline = Pipeline(seed, folder / "data", folder / "runs")
    hasty = pipeline.hasty_reward_model_config()
    connect(ClusterSection())
    try:
        pipeline.run_to_pairs()
        fit(RewardModelTrainer(hasty))
    finally:
        ray.shutdown()
    reward_model = str(pipeline.runs / hasty.name / "reward_model")
    sweep = yaml.safe_load((REPOSITORY / "sweeps" / "kl_coef.yaml").read_text())
    by_the_demo = f"runs/{hasty.name}/reward_model"
    assert sweep["overrides"] == {"model.reward": by_the_demo, "model.critic": by_the_demo}
    models = dict.fromkeys(sweep["overrides"], reward_model)
    base = pipeline.ppo_config(**models).model_dump(mode="json")
    (folder / "ppo.yaml").write_text(yaml.safe_dump(base))
    sweep |= {"base": str(folder / "ppo.yaml"), "storage_path": base["storage_path"]}
    return {**sweep, "overrides": {}}, base


def device_seconds(*arguments: str | Path) -> float:
    """Run a command, and return its device-seconds: its duration times the cores it holds."""
    begin = time.monotonic()
    command = raypo(*arguments)
    _, error = command.communicate()
    assert command.returncode == 0, error
    return NUM_CORES * (time.monotonic() - begin)


def trials_of(sweep: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    path = sweep / "trials.parquet"
    return pq.read_table(path).to_pylist() if path.exists() else []


def killed_in_the_middle(path: Path, folder: Path) -> float:
    """Device-seconds of a sweep from its start until it was killed."""
    begin = time.monotonic()
    command = raypo("sweep", path)
    while sum(t["status"] in ("finished", "stopped") for t in trials_of(folder)) < KILL_AFTER:
        assert command.poll() is None, command.communicate()[1]
        time.sleep(1)
    os.killpg(command.pid, signal.SIGKILL)
    command.wait()
    return NUM_CORES * (time.monotonic() - begin)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_coefficient_between_the_ends_wins_for_half_the_price(tmp_path: Path, seed: int):
    """The ends, which the sweep may stop early, run to their end for themselves."""
    sweep, base = prepared(tmp_path, seed)
    path, runs = tmp_path / "kl_coef.yaml", Path(base["storage_path"])
    path.write_text(yaml.safe_dump(sweep))
    coefs = sorted(sweep["space"]["ppo.kl.coef"]["grid"])
    assert coefs[-1] >= 1000 * coefs[0]
    alone_s, ends = [], []
    for coef in (coefs[0], coefs[-1]):
        arguments = ("train", tmp_path / "ppo.yaml", f"name=alone-{coef}", f"ppo.kl.coef={coef}")
        alone_s.append(device_seconds(*arguments))
        ends.append(values_of(read_metrics(runs / f"alone-{coef}"), "eval/score_mean")[-1])

    sweep_s = killed_in_the_middle(path, runs / "kl_coef") if seed == 0 else 0.0
    sweep_s += device_seconds("sweep", path)

    trials = trials_of(runs / "kl_coef")
    for trial in trials:
        print({key: trial[key] for key in ("space/ppo.kl.coef", "eval/score_mean", "step")})
    print(f"ends {ends}; alone {alone_s}, the sweep {sweep_s:.0f} device-seconds")
    best = yaml.safe_load((runs / "kl_coef" / "best.yaml").read_text())["ppo"]["kl"]["coef"]
    assert coefs[0] < best < coefs[-1]
    assert trials[0]["space/ppo.kl.coef"] == best
    assert trials[0]["eval/score_mean"] > max(ends)
    assert len(trials) == len(coefs)
    assert sweep_s <= 0.5 * len(coefs) * sum(alone_s) / len(alone_s)
