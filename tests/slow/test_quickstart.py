"""The demo's conditions hold for several seeds, and not with scores that mean nothing."""

import random
from functools import lru_cache
from pathlib import Path

import pytest

from examples.quickstart.demo import Pipeline, read_metrics, table, values_of
from raypo import PPOTrainer, Rollout
from raypo.serving.frozen import RewardModel

pytestmark = pytest.mark.usefixtures("local_ray")
MAX_CONTROL_GAIN = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quickstart")


def pipeline_in(folder: Path, seed: int) -> Pipeline:
    return Pipeline(seed, folder / f"{seed}" / "data", folder / f"{seed}" / "runs")


@lru_cache
def reward_model(path: str) -> RewardModel:
    return RewardModel(path, policy=path, dtype="float32", max_batch_tokens=8192)


class ShuffledScores:
    """The reward model's scores, dealt out at random: same numbers, no meaning."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.generator = random.Random(0)

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        scores = reward_model(self.path).score(rollouts)
        self.generator.shuffle(scores)
        return scores


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_demo_meets_its_conditions(folder, seed):
    pipeline = pipeline_in(folder, seed)

    pipeline.run()

    results = pipeline.conditions()
    print(table(results))
    assert all(result.is_met for result in results), "\n" + table(results)


def test_shuffled_scores_teach_nothing(folder):
    pipeline = pipeline_in(folder, 0)
    pipeline.run_to_reward_model()
    scores = ShuffledScores((pipeline.reward_model / "reward_model").absolute())
    config = pipeline.ppo_config(**{"name": "control", "model.reward": None})

    PPOTrainer(config, reward_funcs=scores).fit()

    verifier = values_of(read_metrics(pipeline.runs / "control"), "eval/score_mean")
    print(verifier)
    assert verifier[-1] - verifier[0] < MAX_CONTROL_GAIN
