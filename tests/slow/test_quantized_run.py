"""A whole run whose engine samples in FP8."""

from pathlib import Path

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import read_metrics, write_task

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_run_trains_on_what_an_fp8_engine_sampled(tmp_path: Path):
    keys = {
        "num_steps": 3,
        "model.dtype": "bfloat16",
        "rollout.engine.quantization": "fp8",
        "rollout.engine.kv_cache_dtype": "fp8",
        "ppo.correction.kind": "tis",
        "learner.policy_lr": 1e-2,
    }
    PPOTrainer(PPOConfig.load(write_task(tmp_path), keys)).fit()
    metrics = read_metrics(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(0.02 < row["mismatch/log_prob_gap_mean"] < 0.35 for row in metrics)
    assert metrics[-1]["kl/ref_response_mean"] > 1e-3
