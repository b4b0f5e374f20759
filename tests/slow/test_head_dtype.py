"""A whole run in bfloat16 with the head in float32 on both sides, and with a masked surrogate."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from raypo import PPOConfig, PPOTrainer
from raypo.storage.run_files import RunFiles
from tests.integration.task import write_task
from tests.tiny import tiny_policy

KEYS = {
    "num_steps": 2,
    "model.dtype": "bfloat16",
    "ppo.preset": "grpo",
    "ppo.top_entropy_fraction": 0.5,
    "ppo.correction.off_policy_mask": 0.01,
    "learner.policy_lr": 1e-3,
}


def test_a_head_in_float32_brings_engine_and_learner_together(tmp_path: Path, local_ray: None):
    """After the first push and after an update; logits are five times those of a random policy."""
    task = write_task(tmp_path)
    policy = tiny_policy(tmp_path / "policy", tied=False)
    network: Any = AutoModelForCausalLM.from_pretrained(policy)
    network.lm_head.weight.data.mul_(5.0)
    network.to(torch.bfloat16).save_pretrained(policy)

    steps: dict[str, list[dict[str, Any]]] = {}
    for head_dtype in ("model", "float32"):
        keys = KEYS | {"name": head_dtype, "model.head_dtype": head_dtype}
        PPOTrainer(PPOConfig.load(task, keys)).fit()
        steps[head_dtype] = RunFiles.at(str(tmp_path / "runs" / head_dtype)).metrics()

    for rounded, exact in zip(steps["model"], steps["float32"], strict=True):
        assert exact["mismatch/log_prob_gap_mean"] < rounded["mismatch/log_prob_gap_mean"]
        assert 0.0 < exact["ppo/entropy_threshold"] < 5.0
        assert 0.0 < exact["ppo/off_policy_fraction"] < 0.5
    # The reference has such a head too: before the first update it agrees with the policy.
    assert abs(steps["float32"][0]["kl/ref_mean"]) < 1e-3
