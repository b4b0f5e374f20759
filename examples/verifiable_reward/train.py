"""PPO from Python: a PPOTrainer is a Ray Train TorchTrainer with a reward function.

make demo && python examples/verifiable_reward/train.py
"""

from ray.train import FailureConfig, RunConfig, ScalingConfig

from raypo import PPOConfig, PPOTrainer, Rollout


def exact(rollouts: list[Rollout]) -> list[float]:
    """1 for the right answer, 0 otherwise; any function of rollouts will do."""
    return [float(rollout.response == rollout.label) for rollout in rollouts]


if __name__ == "__main__":
    trainer = PPOTrainer(
        PPOConfig.load("examples/verifiable_reward/ppo.yaml", overrides={"ppo.kl.coef": 0.05}),
        reward_funcs=exact,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=False),
        run_config=RunConfig(name="from-python", failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    print(result.metrics_dataframe)
