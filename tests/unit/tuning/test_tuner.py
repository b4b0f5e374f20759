"""Refusals and counts of `raypo.Tuner` before any trial starts."""

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import yaml
from ray import tune
from ray.train import RunConfig
from ray.train.torch import TorchConfig
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.search.optuna import OptunaSearch

from raypo import ConfigError, RejectionSamplingTrainer, SFTConfig, SFTTrainer, Tuner
from raypo.cluster.placement import Bundle
from raypo.ray_internals import CHECKPOINTS, PastTrial
from raypo.storage.run_files import RunFiles
from raypo.tuning.board import Board
from raypo.tuning.capacity import SweepPlan
from raypo.tuning.experiment import Interruption
from raypo.tuning.goal import Goal
from raypo.tuning.population import Segment
from raypo.tuning.shared import Sharing
from raypo.tuning.trial import TrialReports, point_of, trial_trainer_class
from tests.integration.pipeline import rounds_values, sft_values, write_examples


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    write_examples(tmp_path)
    return sft_values(tmp_path)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"learner.rate": tune.uniform(0, 1)}, r"param_space\.learner\.rate: .* no such key"),
        ({"learner": {"rate": 0.1}}, r"param_space\.learner\.rate: .* no such key"),
        ({"num_steps": tune.grid_search([1, 2])}, r"param_space\.num_steps: is the same for all"),
        ({"name": tune.choice(["a"])}, r"param_space\.name: is the same for all"),
        ({"learner.lr": tune.grid_search([0.1, -1.0])}, r"a trial with learner.lr=-1.0"),
        ({"learner.batch_size": tune.choice([8, "x"])}, r"a trial with learner.batch_size=x"),
    ],
)
def test_a_space_that_a_run_would_refuse(values: dict[str, Any], space: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Tuner(values, param_space=space)


def test_what_has_no_effect_is_refused(values: dict[str, Any]):
    kept = tune.CheckpointConfig(num_to_keep=1)
    with pytest.raises(ConfigError, match=r"checkpoint_config.*checkpoint\.keep"):
        Tuner(values, run_config=tune.RunConfig(checkpoint_config=kept))
    with pytest.raises(ConfigError, match=r"a trial: name \('my sweep'\)"):
        Tuner(values, run_config=tune.RunConfig(name="my sweep"))


@pytest.mark.parametrize(
    ("tuned", "stop", "told"),
    [
        (tune.TuneConfig(metric="eval/los", mode="min"), None, r"TuneConfig\.metric \(eval/los\)"),
        (
            tune.TuneConfig(scheduler=ASHAScheduler(metric="eval/los", mode="min")),
            None,
            r"scheduler\.metric \(eval/los\): .* Did you mean eval/loss\?",
        ),
        (None, {"train/los": 0.1}, r"RunConfig\.stop\.train/los \(train/los\)"),
    ],
)
def test_a_metric_that_no_trial_can_log_is_refused(
    values: dict[str, Any], tuned: tune.TuneConfig | None, stop: Any, told: str
):
    with pytest.raises(ConfigError, match=told):
        Tuner(values, tune_config=tuned, run_config=tune.RunConfig(stop=stop))
    added = values | {"callbacks": ["tests.unit.tuning.test_tuner:adds_a_metric"]}
    Tuner(added, tune_config=tuned, run_config=tune.RunConfig(stop=stop))
    with_callback = SFTTrainer(values, callbacks=[adds_a_metric])
    Tuner(with_callback, tune_config=tuned, run_config=tune.RunConfig(stop=stop))


def adds_a_metric(step: Any) -> dict[str, float]:
    return {"eval/los": 0.0}


@pytest.mark.parametrize("rule", ["loss < 1", [lambda trial, result: True]])
def test_a_stop_rule_that_tune_does_not_know_is_refused(values: dict[str, Any], rule: Any):
    with pytest.raises(ConfigError, match=r"RunConfig\.stop \(.*must be a mapping"):
        Tuner(values, run_config=tune.RunConfig(stop=rule))


def test_a_space_of_a_function_that_the_trainer_has_from_python_is_refused(tmp_path: Path):
    write_examples(tmp_path)
    values = rounds_values(tmp_path, "rejection_sampling")
    trainer = RejectionSamplingTrainer(values, reward_funcs=lambda rollouts: [0.0] * len(rollouts))
    space = {"reward.function": tune.grid_search(["a.py:one", "a.py:two"])}
    with pytest.raises(ConfigError, match=r"param_space\.reward\.function: every trial has"):
        Tuner(trainer, param_space=space)


def test_a_config_in_any_form_and_a_space_in_either(values: dict[str, Any], tmp_path: Path):
    from_trainer = Tuner(SFTTrainer(SFTConfig.parse(values)), param_space={"learner.lr": 0.1})
    nested = Tuner({**values}, param_space={"learner": {"lr": tune.grid_search([0.1, 0.2])}})

    def rates(tuner: Tuner) -> list[float]:
        return [trial.model_dump()["learner"]["lr"] for trial in tuner.trials]

    assert rates(from_trainer) == [0.1]
    assert rates(nested) == [0.1, 0.2]
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    of_file = Tuner(tmp_path / "sft.yaml", run_config=tune.RunConfig(name="mine"))
    assert of_file.location == f"{tmp_path}/runs/mine"


def test_the_number_of_trials(values: dict[str, Any]):
    def count(space: Any, **arguments: Any) -> tuple[int, int]:
        tuner = Tuner(values, param_space=space, tune_config=tune.TuneConfig(**arguments))
        return tuner.num_trials, tuner.max_concurrent

    grid = {"learner.lr": tune.grid_search([0.1, 0.2]), "seed": tune.randint(0, 9)}
    assert count(grid, num_samples=3) == (6, 6)
    assert count(grid, num_samples=3, max_concurrent_trials=2) == (6, 2)
    space = {"learner.lr": tune.loguniform(1e-4, 1e-2)}
    searcher = OptunaSearch(metric="eval/loss", mode="min")
    assert count(space, search_alg=searcher, num_samples=5) == (5, 5)
    limited = ConcurrencyLimiter(searcher, max_concurrent=4)
    assert count(space, search_alg=limited, num_samples=5, scheduler=ASHAScheduler()) == (5, 4)
    assert count(space, search_alg=limited, num_samples=3) == (3, 3)
    assert count(grid, search_alg=BasicVariantGenerator(max_concurrent=1)) == (2, 1)
    assert count(space, num_samples=-1, time_budget_s=9)[0] > 10**6


def test_an_experiment_is_restored_with_the_arguments_that_it_began_with(
    values: dict[str, Any], tmp_path: Path
):
    space = {"learner.lr": tune.grid_search([0.1, 0.2])}
    began = Tuner(
        values,
        param_space=space,
        tune_config=tune.TuneConfig(metric="eval/loss", mode="min", num_samples=3),
        run_config=tune.RunConfig(name="mine", stop={"step": 5}),
        share=[],
    )
    began._write_arguments()
    moved = tmp_path / "elsewhere"
    (tmp_path / "runs" / "mine").rename(moved)
    restored = Tuner.restore(moved, values, resume_errored=True)
    assert (restored.location, restored.num_trials) == (str(moved), 6)
    assert restored._tune_config == began._tune_config
    assert restored._run_config.stop == {"step": 5}
    assert restored._share == []
    assert restored.trials[0].model_dump()["learner"]["lr"] == 0.1
    assert restored._resume is not None
    assert restored._resume.errored == tune.ResumeConfig.ResumeType.RESUME
    with pytest.raises(ConfigError, match=r"was started with another one:\n  num_steps: .* -> 99"):
        Tuner.restore(moved, values | {"num_steps": 99})


def test_a_folder_without_an_experiment_is_not_restored(values: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"path \(.*nowhere\): holds no experiment"):
        Tuner.restore(tmp_path / "nowhere", values)


def test_values_are_plain_and_a_mapping_that_is_a_value_stays_one():
    config = {"learner": {"lr": np.float64(0.5)}, "learner.batch_size": np.int64(3)}
    point = point_of(config | {"data.chat_template_kwargs": {"a": {"b": 1}}}, SFTConfig)
    assert [type(value) for value in point.values()] == [float, int, dict]
    assert point == {
        "learner.lr": 0.5,
        "learner.batch_size": 3,
        "data.chat_template_kwargs": {"a": {"b": 1}},
    }


def test_trials_get_the_trainers_torch_config_and_the_environment_of_its_workers(
    values: dict[str, Any],
):
    trainer = SFTTrainer(
        SFTConfig.parse(values),
        torch_config=TorchConfig(timeout_s=77),
        run_config=RunConfig(worker_runtime_env={"env_vars": {"NCCL_DEBUG": "INFO"}}),
    )
    tuner = Tuner(trainer)
    setup = cloudpickle.loads(cloudpickle.dumps(tuner._trial_setup(tuner._values, tuner.goal)))
    config = setup.config("a-00000", {})
    reports = TrialReports(setup.goal, {}, RunFiles(setup.storage_path, "a-00000"), None)
    trial: Any = trial_trainer_class(config)(config, setup, reports, None)
    assert trial.run_config.worker_runtime_env["env_vars"] == {"NCCL_DEBUG": "INFO"}
    assert trial.backend_config.timeout_s == 77


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_a_pbt_trials_list_of_checkpoints_is_mended_in_its_segment(values: dict[str, Any]):
    tuner = Tuner(SFTTrainer(SFTConfig.parse(values)))
    setup = tuner._trial_setup(tuner._values, tuner.goal)
    config = setup.config("a-00000", {})
    files = RunFiles(config.storage_path, config.name)
    segment = Segment(files.name, number=2)
    reports = TrialReports(setup.goal, {}, files, segment)
    trial: Any = trial_trainer_class(config)(config, setup, reports, segment)
    folder = RunFiles(files.location, "segment_2")
    folder.write("checkpoint_1/run.json", b'{"step": 1, "metrics": {}}')
    folder.write(CHECKPOINTS, b'{"checkpoint_res')
    assert "was rewritten" in trial._mend_list()
    assert b"checkpoint_1" in (folder.read(CHECKPOINTS) or b"")


@pytest.mark.parametrize(
    ("run", "is_own"),
    [
        (tune.RunConfig(), True),
        (tune.RunConfig(stop={"step": 3}, name="mine"), True),
        (tune.RunConfig(verbose=1), False),
        (tune.RunConfig(verbose=0), False),
        (tune.RunConfig(progress_reporter=tune.CLIReporter()), False),
    ],
)
def test_trials_are_shown_by_raypo_unless_the_user_wants_rays_output(
    values: dict[str, Any], run: tune.RunConfig, is_own: bool
):
    assert Tuner(values, run_config=run).shows_trials == is_own


@pytest.mark.parametrize("is_shown", [True, False])
def test_the_board_shows_the_metric_that_is_optimised(
    values: dict[str, Any], is_shown: bool, capsys: pytest.CaptureFixture[str]
):
    """Ray prints 75 metrics of each ended trial, and not the one that is optimised."""
    base, goal = SFTConfig.parse(values | {"num_steps": 2}), Goal(("eval/loss",), (-1.0,))
    plan = SweepPlan(2, (Bundle({"CPU": 1.0}, ()),), 1, Sharing())
    board = Board(base, goal, plan, interruption=Interruption(), is_shown=is_shown)
    for name, rate, losses in (("a-00000", 0.1, (0.9, 0.5)), ("a-00001", 0.2, (0.9, 0.7))):
        trial: Any = PastTrial(name, {"learner": {"lr": rate}})
        trial.status = "RUNNING"
        board.on_trial_start(1, [trial], trial)
        for step, loss in enumerate(losses, start=1):
            report = {"step": step, "eval/loss": loss, "ppo/a_metric": 7.0, "pid": 3}
            board.on_trial_result(1, [trial], trial, report)
        board.on_trial_complete(1, [trial], trial)
    board.close()
    assert [record.status for record in board.records] == ["finished"] * 2
    assert board.records[1].point == {"learner.lr": 0.2}
    out = capsys.readouterr().out
    if not is_shown:
        assert not out
        return
    assert "at step 2; eval/loss 0.5; " in out
    assert "eval/loss 0.7; " in out
    assert out.count("best so far: ") == 2
    assert "a_metric" not in out
    table = [line.split() for line in out.splitlines()[-2:]]
    assert [(row[0], row[2]) for row in table] == [("1*", "0.5"), ("2", "0.7")]
