"""A run that hangs says who waits for whom, leaves the stacks of its processes, and ends."""

import time
from pathlib import Path

import pytest
from ray.train import WorkerGroupError

from raypo import PPOConfig, PPOTrainer, Rollout

pytestmark = pytest.mark.usefixtures("local_ray")

TIMEOUT_S = 6.0


def answers_never(rollouts: list[Rollout]) -> list[float]:
    if len(rollouts) == 32:  # not in the trial before the start
        time.sleep(600.0)
    return [0.0] * len(rollouts)


def test_a_reward_function_that_never_answers_is_named_and_the_run_ends(
    task: Path, capsys: pytest.CaptureFixture[str]
):
    config = PPOConfig.load(
        task,
        {
            "name": "hang",
            "reward.function": "tests.integration.test_hang:answers_never",
            "placement.hang_timeout_s": TIMEOUT_S,
            "placement.deployment.health_check_period_s": 1.0,
            "eval.prompts": None,
        },
    )
    with pytest.raises(WorkerGroupError) as caught:
        PPOTrainer(config).fit()
    (folder,) = (task.parent / "runs" / "hang" / "hangs").iterdir()
    message = (folder / "what.txt").read_text()
    assert message.startswith("hang: no progress for ")
    assert (
        "learner worker 0 does not go on in scoring > the reward function "
        "tests.integration.test_hang.answers_never (32 responses), in answers_never (test_hang.py:"
    ) in message
    assert message.strip() in str(caught.value)
    assert f"are in {folder}. If the run was only slow, raise" in str(caught.value)
    assert "hang: no progress for" in capsys.readouterr().out
    # Their names end with the process id.
    stacks = {
        path.stem.rpartition("_")[0]: path.read_text() for path in folder.glob("*_*[0-9].txt")
    }
    roles = {"driver", "learner_worker_0", "TrainController", "raypo_hang_engine_0"}
    assert roles < stacks.keys()
    assert "answers_never (test_hang.py:" in stacks["learner_worker_0"]
    assert "fit (raypo/trainer/trainer.py:" in stacks["driver"]
    own = (folder / "learner_worker_0_python.txt").read_text()
    assert "in answers_never" in own
