"""raypo's training loop in a plain Ray Train TorchTrainer: it starts engine and models by itself.

make demo && python examples/quickstart/bare_loop.py
"""

from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypo import PPOConfig, train_loop_per_worker

if __name__ == "__main__":
    # Ray's workers run in a folder of their own: relative paths are made absolute here.
    config = PPOConfig.load("examples/quickstart/ppo.yaml").with_absolute_paths()
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config.model_dump(),
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 2}),
        run_config=RunConfig(name="quickstart-bare", storage_path=str(Path("runs").absolute())),
    )
    print(trainer.fit())
