"""What changes from step to step goes on where it was when a worker is killed."""

import threading
from pathlib import Path
from typing import Any

import pytest
from ray.train import FailureConfig, RunConfig

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import kill_train_workers_after, numbers, read_metrics


def test_a_run_that_goes_on_keeps_its_schedule_and_its_entropy_coefficient(
    local_ray: None, task: Path
):
    """Also which tokens a step holds back, and sampling that is cut off and stopped by a text."""
    values: dict[str, Any] = {
        "learner.lr_schedule": "cosine",
        "learner.lr_warmup_steps": 1,
        "learner.lr_floor": 0.1,
        "ppo.policy_loss": "kl_cov",
        "ppo.covariance.fraction": 0.1,
        "ppo.entropy_coef": 0.01,
        "ppo.entropy_target": 4.0,
        "ppo.nll_coef": 0.1,
        "ppo.nll_min_score": 0.2,
        "ppo.mask_truncated": True,
        "rollout.top_k": 20,
        "rollout.stop": ["1", "2"],
        "eval.prompts": None,
    }
    runs, metrics = task.parent / "runs", {}
    killer = threading.Thread(target=kill_train_workers_after, args=(runs / "halves", 3))
    for name in ("whole", "halves"):
        if name == "halves":
            killer.start()
        run_config = RunConfig(name=name, failure_config=FailureConfig(max_failures=1))
        PPOTrainer(PPOConfig.load(task, values), run_config=run_config).fit()
        metrics[name] = read_metrics(runs / name)
    killer.join(timeout=10)

    assert numbers(metrics["halves"]) == numbers(metrics["whole"])
    rates = [row["ppo/policy_learning_rate"] for row in metrics["whole"]]
    assert rates == pytest.approx([5e-4, 1e-3, 7.75e-4, 3.25e-4])
    coefficients = [row["ppo/entropy_coef"] for row in metrics["whole"]]
    assert coefficients[0] == 0.01
    assert len(set(coefficients)) > 1
    assert all(row["ppo/nll_loss"] >= 0.0 for row in metrics["whole"])
