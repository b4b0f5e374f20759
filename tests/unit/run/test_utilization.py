from pathlib import Path

import pytest

from raypo.config import PPOConfig
from raypo.rollout.step_batch import StepBatch
from raypo.run.utilization import Work, models_of, step_work, work_metrics
from raypo.types import Rollout
from tests.rollouts import plain_rollout
from tests.tiny import tiny_policy


def scored(group: int, sample: int, *, prompt: int, response: int) -> Rollout:
    return plain_rollout(prompt, response, group_index=group, sample_index=sample, score=1.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    folder = tiny_policy(tmp_path_factory.mktemp("policy"))
    return PPOConfig.parse(
        {
            "name": "work",
            "model": {"policy": str(folder)},
            "data": {"prompts": "prompts.jsonl"},
            "reward": {"function": "some:where"},
            "ppo": {"num_epochs": 2, "critic_warmup_steps": 1},
        },
        origin="test",
    )


def test_each_phase_has_what_passes_it(config: PPOConfig):
    every = [scored(0, i, prompt=4, response=3) for i in range(2)]
    collected = StepBatch(every, every[:1], 0, {})
    work = step_work(collected, models_of(config), config, step=2)
    assert {name: (each.samples, each.tokens) for name, each in work.items()} == {
        "generate": (2, 6),
        "score": (2, 14),
        "log_probs": (1, 7),
        "update": (2, 14),
    }
    assert work["update"].flops == 3 * 2 * work["log_probs"].flops
    assert work["score"].flops == work["generate"].flops

    alone = [scored(i, 0, prompt=4, response=3) for i in range(2)]
    apart = step_work(StepBatch(alone, [], 0, {}), models_of(config), config, step=2)
    assert apart["generate"].flops == apart["score"].flops
    assert apart["score"].flops > work["score"].flops  # a group's prompt is read once


def test_a_step_of_one_update_makes_no_pass_for_old_log_probs(config: PPOConfig):
    every = [scored(0, i, prompt=4, response=3) for i in range(2)]
    keys = {"advantage": "grpo", "num_epochs": 1, "critic_warmup_steps": 0, "kl": {"coef": 0.0}}
    for size, passes in ((2, 0), (1, 1)):
        ppo = config.ppo.model_validate({**keys, "minibatch_size": size})
        one = config.model_copy(update={"ppo": ppo})
        work = step_work(StepBatch(every, every, 0, {}), models_of(one), one, step=1)
        assert 3 * work["log_probs"].flops == passes * work["update"].flops


def test_what_has_devices_of_its_own_is_not_the_workers_work(config: PPOConfig):
    every = [scored(0, 0, prompt=4, response=3)]
    collected, models = StepBatch(every, every, 0, {}), models_of(config)
    here = step_work(collected, models, config, step=2)
    there = step_work(collected, models, config, step=2, elsewhere={"engine", "reference"})
    assert here["generate"].flops > 0 < here["score"].flops
    assert there["generate"].flops == there["score"].flops == 0
    assert there["update"] == here["update"]
    assert there["generate"].tokens == here["generate"].tokens


def test_a_policy_that_waits_for_its_critic_is_not_counted(config: PPOConfig):
    every = [scored(0, 0, prompt=4, response=3)]
    collected, models = StepBatch(every, every, 0, {}), models_of(config)
    warming = step_work(collected, models, config, step=1)["update"]
    after = step_work(collected, models, config, step=2)["update"]
    assert 0 < warming.flops < after.flops


def test_a_model_of_unknown_shape_has_rates_and_no_utilisation(config: PPOConfig, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    unknown = config.model_copy(
        update={"model": config.model.model_copy(update={"policy": str(tmp_path)})}
    )
    assert models_of(unknown) is None
    every = [scored(0, 0, prompt=4, response=3)]
    work = step_work(StepBatch(every, every, 0, {}), None, config, step=1)
    figures = work_metrics(work, {"time/generate_s": 2.0, "time/step_s": 4.0}, peak_flops=1.0)
    assert figures == {"perf/generate_samples_per_s": 0.5, "perf/generate_tokens_per_s": 1.5}


def test_utilisation_is_flops_over_seconds_and_peak():
    work = {"generate": Work(1, 10, flops=2e9), "update": Work(1, 10, flops=6e9)}
    seconds = {"time/generate_s": 1.0, "time/update_s": 2.0, "time/step_s": 4.0}
    figures = work_metrics(work, seconds, peak_flops=1e10)
    assert figures["perf/generate_mfu"] == pytest.approx(0.2)
    assert figures["perf/update_mfu"] == pytest.approx(0.3)
    assert figures["perf/mfu"] == pytest.approx(0.2)
    assert figures["perf/peak_tflops"] == pytest.approx(0.01)
    assert figures["perf/update_tokens_per_s"] == 5.0
