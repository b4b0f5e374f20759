"""What Python passes to PPOTrainer wins over the file; what Ray makes up does not."""

from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig

from raypo.config import PPOConfig
from raypo.trainer.settings import CONTROLLER_FAILURE_LIMIT, resolve, run_config_of


def config() -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "from-file",
            "storage_path": "/from/file",
            "model": {"policy": "p"},
            "data": {"prompts": "d.jsonl"},
        }
    )


def test_what_ray_makes_up_leaves_the_file_alone():
    resolved = resolve(config(), None, RunConfig(failure_config=FailureConfig()))
    assert (resolved.name, resolved.storage_path) == ("from-file", "/from/file")


def test_name_storage_workers_and_function_from_python_win():
    resolved = resolve(
        config(),
        ScalingConfig(num_workers=3, use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 1}),
        RunConfig(name="mine", storage_path="s3://bucket/runs"),
        len,  # type: ignore[arg-type]
    )
    assert (resolved.name, resolved.storage_path) == ("mine", "s3://bucket/runs")
    assert resolved.learner.num_workers == 3
    assert resolved.learner.use_gpu is True
    assert resolved.learner.cpus_per_worker == 4
    assert resolved.reward.function == "builtins:len"


def test_a_start_that_can_never_succeed_is_not_tried_for_ever(tmp_path: Path):
    run = run_config_of(config(), RunConfig(failure_config=FailureConfig(max_failures=5)))
    assert run.failure_config is not None
    assert run.failure_config.max_failures == 5
    assert run.failure_config.controller_failure_limit == CONTROLLER_FAILURE_LIMIT
    assert run.checkpoint_config is not None
    assert run.checkpoint_config.num_to_keep == 2
