"""Rounds whose policy lies in shares of ZeRO-3 on two workers, pushed from them."""

from pathlib import Path

import pytest

from raypo import RejectionSamplingConfig, RejectionSamplingTrainer
from tests.integration.pipeline import rounds_values, write_examples
from tests.integration.task import read_metrics

pytestmark = pytest.mark.usefixtures("local_ray")


def test_shares_learn_and_push_what_one_worker_does(tmp_path: Path):
    write_examples(tmp_path)
    last = []
    for name, more in (("one", {}), ("shares", {"num_workers": 2, "zero_stage": 3})):
        values = rounds_values(tmp_path, "rejection_sampling") | {"name": name, "num_steps": 2}
        values["learner"] |= more
        RejectionSamplingTrainer(RejectionSamplingConfig.parse(values)).fit()
        rows = read_metrics(tmp_path / "runs" / name)
        assert all(row["mismatch/probe_gap_max"] < 1e-3 for row in rows)
        last.append(rows)
    one, shares = last
    assert shares[0]["selection/score_mean"] == one[0]["selection/score_mean"]
    assert shares[0]["train/loss"] == pytest.approx(one[0]["train/loss"], rel=1e-4)
    assert shares[1]["eval/score_mean"] == pytest.approx(one[1]["eval/score_mean"], abs=0.1)
