"""sweeps/kl_coef.yaml: the verifier picks a coefficient between the ends, for half the price."""

import json
import time
from pathlib import Path

import pytest
import yaml

from tests.integration.task import REPOSITORY, raypo
from tests.slow.test_quickstart import local_ray, pipeline_in

__all__ = ["local_ray"]
NUM_CORES = 2
"""That a trial of the demo's PPO holds."""


def run(*arguments: str | Path) -> float:
    """Device-seconds of a command."""
    begin = time.monotonic()
    command = raypo(*arguments)
    _, error = command.communicate()
    assert command.returncode == 0, error
    return NUM_CORES * (time.monotonic() - begin)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_coefficient_between_the_ends_wins_for_half_the_price(tmp_path: Path, seed: int):
    pipeline = pipeline_in(tmp_path, seed)
    pipeline.run_to_reward_model()
    alone = pipeline.ppo_config(name="alone").model_dump(mode="json")
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(alone))
    separate_s = run("train", tmp_path / "ppo.yaml")
    sweep = yaml.safe_load((REPOSITORY / "sweeps" / "kl_coef.yaml").read_text())
    sweep |= {"base": str(tmp_path / "ppo.yaml"), "storage_path": str(tmp_path)}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    sweep_s = run("sweep", tmp_path / "sweep.yaml")

    import pyarrow.parquet as pq

    trials = pq.read_table(tmp_path / "kl_coef" / "trials.parquet").to_pylist()
    rows = sorted(
        (trial["space/ppo.kl.coef"], trial["eval/score_mean"], trial["step"]) for trial in trials
    )
    print(json.dumps(rows), f"{separate_s:.0f} and {sweep_s:.0f} device-seconds")
    scores = [score for _, score, _ in rows]
    assert max(scores) > max(scores[0], scores[-1])
    assert sweep_s <= 0.5 * len(rows) * separate_s
