from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig, RejectionSamplingConfig
from raypo.config.space import Domain, flat_space
from raypo.config.sweep_config import Constraint, SweepConfig, with_values
from raypo.storage.run_files import RunFiles
from raypo.tuning.sweep_folder import check_sweep_folder, recorded_config

BASE = """
name: quick
model: {policy: tiny}
data: {prompts: prompts.jsonl}
rollout: {prompts_per_step: 8, samples_per_prompt: 4}
eval: {prompts: held_out.jsonl}
"""
COEFFICIENT = {"ppo.kl.coef": {"loguniform": [1e-4, 1.0]}}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE)
    return path


def sweep_of(base: Path, **changes: Any) -> SweepConfig:
    values = {"name": "s", "base": str(base), "space": COEFFICIENT} | changes
    return SweepConfig.parse(values, origin="sweep.yaml")


def refused(base: Path, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        sweep_of(base, **changes).base_config()
    return str(error.value)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        (3, "must be one of choice, grid, uniform"),
        ({"uniform": [0, 1], "choice": [1]}, "must be one of choice, grid, uniform"),
        ({"uniform": [1.0, 0.5]}, "low (1) must be below high (0.5)"),
        ({"uniform": [1.0]}, "must be [low, high]"),
        ({"uniform": ["a", 1]}, "must be numbers"),
        ({"uniform": [0.0, float("inf")]}, "must be numbers"),
        ({"loguniform": [0.0, 1.0]}, "low (0) must be above 0"),
        ({"randint": [1, 2.5]}, "must be whole numbers"),
        ({"choice": [1, 1]}, "a value is listed twice"),
        ({"choice": []}, "must be a list of values"),
    ],
)
def test_a_domain_that_is_none_is_refused_with_its_rule(written: Any, rule: str):
    with pytest.raises(ValueError, match=r"space\.ppo\.x") as error:
        Domain.parse("ppo.x", written)
    assert rule in str(error.value)


def test_an_override_on_the_command_line_reaches_a_dotted_key(base: Path, tmp_path: Path):
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"name: s\nbase: {base}\nspace:\n  ppo.kl.coef: {{loguniform: [1.0e-4, 1.0]}}\n"
    )
    sweep = SweepConfig.load(file, ["space.ppo.kl.coef={choice: [0.1, 0.2]}", "num_samples=3"])
    assert sweep.space == {"ppo.kl.coef": Domain("choice", (0.1, 0.2))}
    assert sweep.num_trials == 3


def test_a_key_that_went_is_refused_with_what_to_write(base: Path):
    assert "resources: there is no such key" in (message := refused(base, resources={"cpus": 2}))
    assert message.endswith("set max_concurrent if trials have to wait.")


def test_nested_and_dotted_spaces_are_the_same():
    nested = {"ppo": {"kl": {"coef": {"uniform": [0, 1]}}, "clip_low": {"choice": [1]}}}
    assert flat_space(nested) == {
        "ppo.kl.coef": {"uniform": [0, 1]},
        "ppo.clip_low": {"choice": [1]},
    }


def test_a_key_that_the_run_config_has_not_is_refused_with_the_nearest(base: Path):
    message = refused(base, space={"ppo.kl.coeff": {"uniform": [0, 1]}})
    assert message == (
        "space.ppo.kl.coeff: the run config has no such key. Did you mean ppo.kl.coef?"
    )


def test_a_section_and_what_the_sweep_sets_itself_are_refused(base: Path):
    assert "is a section" in refused(base, space={"ppo.kl": {"choice": [1]}})
    for key in ("name", "storage_path", "cluster.namespace", "max_failures"):
        assert "is the same for all trials" in refused(base, space={key: {"choice": ["a"]}})


def test_values_that_the_run_config_refuses_are_refused_at_once(base: Path):
    message = refused(base, space={"ppo.kl.coef": {"uniform": [-1.0, 1.0]}})
    assert "ppo.kl.coef (-1.0): must be greater than or equal to 0" in message
    message = refused(base, space={"rollout.max_new_tokens": {"choice": ["many"]}})
    assert "rollout.max_new_tokens ('many')" in message


def test_combinations_that_the_run_config_refuses_are_refused_at_once(base: Path):
    space = {
        "ppo.minibatch_size": {"choice": [8, 16]},
        "rollout.samples_per_prompt": {"choice": [2, 3]},
    }
    message = refused(base, space=space)
    assert message.startswith("space, ppo.minibatch_size=16, rollout.samples_per_prompt=3: ")
    fitting = {**space, "rollout.samples_per_prompt": {"choice": [2, 4]}}
    sweep_of(base, space=fitting).base_config()


def test_whole_numbers_within_a_range_are_tried_too(base: Path):
    """Both ends divide 32 responses."""
    domain = {"randint": [8, 17]}
    assert "ppo.minibatch_size (" in refused(base, space={"ppo.minibatch_size": domain})


def test_of_a_wide_range_a_hundred_values_stand_for_all():
    tried = Domain("randint", (0, 10**9)).test_values
    assert 100 <= len(tried) <= 102
    assert (tried[0], tried[-1]) == (0, 10**9 - 1)


@pytest.mark.parametrize("rule", [{"at": 0.8}, {"patience": 2}, {"after_s": 60.0}])
def test_a_rule_that_ends_trials_at_other_steps_is_refused(base: Path, rule: dict[str, Any]):
    key = next(iter(rule))
    assert refused(base, overrides={"stop": rule}).startswith(f"stop.{key} (")
    assert f"overrides.stop.{key} to null" in refused(
        base, space={f"stop.{key}": {"choice": [None, *rule.values()]}}
    )


def test_two_keys_that_only_fit_together_are_allowed(base: Path):
    too_large = {"ppo.minibatch_size": {"choice": [64]}}  # for the base's 32 responses
    assert "must divide" in refused(base, space=too_large)
    space = {
        **too_large,
        "rollout.prompts_per_step": {"choice": [16, 32]},
    }
    sweep_of(base, space=space).base_config()


def test_a_preset_in_the_space_still_sets_what_the_base_leaves_unsaid(base: Path):
    sweep = sweep_of(base, space={"ppo.preset": {"choice": ["grpo", "rloo"]}})
    sweep.base_config()
    trial = with_values(sweep.base_values(), {"ppo.preset": "grpo"})
    assert trial["ppo"] == {"preset": "grpo"}
    assert "ppo" not in sweep.base_values()


def test_an_override_of_the_base_is_checked_like_the_base(base: Path):
    assert sweep_of(base, overrides={"num_steps": 3}).base_config().num_steps == 3
    overridden = sweep_of(base, overrides={"ppo.kl.coef": 0.5}).base_config()
    assert isinstance(overridden, PPOConfig)
    assert overridden.ppo.kl.coef == 0.5
    assert "Did you mean num_steps?" in refused(base, overrides={"num_step": 3})


def test_a_metric_that_the_base_never_measures_is_refused(base: Path):
    assert "has no evaluation" in refused(base, overrides={"eval": {"prompts": None}})
    message = refused(
        base,
        overrides={"ppo.kl.coef": 0.0},
        space={"ppo.gamma": {"uniform": [0.9, 1.0]}},
        constraint="kl/ref_response_mean <= 10",
    )
    assert "has no reference" in message
    some = {"ppo.kl.coef": {"choice": [0.0, 0.1]}}
    message = refused(base, space=some, constraint="kl/ref_response_mean <= 10")
    assert "a trial with ppo.kl.coef=0.0 has no reference" in message
    drawn = {"ppo.kl.coef": {"uniform": [0.0, 0.5]}}
    sweep_of(base, space=drawn, constraint="kl/ref_response_mean <= 10").base_config()
    good = {"ppo.kl.coef": {"choice": [0.1, 1.0]}}
    sweep_of(
        base, overrides={"ppo.kl.coef": 0.0}, space=good, metric="kl/ref_response_mean", mode="min"
    ).base_config()


def test_grid_and_searcher_belong_together(base: Path):
    grid = {"ppo.gamma": {"grid": [0.9, 1.0]}, "ppo.kl.coef": {"choice": [0.1, 0.2, 0.3]}}
    assert sweep_of(base, space=grid, searcher="grid").num_trials == 6
    assert "Write choice" in refused(base, space=grid)
    assert "a grid search runs the whole grid, 6 trials" in refused(
        base, space=grid, searcher="grid", num_samples=4
    )
    assert "is a range" in refused(base, searcher="grid")


def test_every_metric_has_its_mode(base: Path):
    two = ["eval/score_mean", "kl/ref_response_mean"]
    assert sweep_of(base, metric=two, mode=["max", "min"]).mode == ("max", "min")
    assert "one mode for each metric" in refused(base, metric=two)


def test_a_constraint_says_by_how_much_it_is_broken(base: Path):
    at_most = Constraint.parse("kl/ref_response_mean <= 10")
    assert at_most.excess(12.5) == 2.5
    assert at_most.excess(4.0) < 0
    assert Constraint.parse("eval/score_mean >= 1e-1").excess(0.0) == 0.1
    assert at_most.excess(float("nan")) == float("inf")
    assert "METRIC <= NUMBER" in refused(base, constraint="kl/ref_response_mean < 10")


REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_sweeps_of_the_repository_are_whole(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(REPOSITORY)
    sweep = SweepConfig.load(path)
    assert sweep.base_config().eval.prompts
    assert sweep.name == path.stem


def test_trials_may_sample_ahead_on_engines_of_their_own(base: Path):
    modes = {"rollout.mode": {"choice": ["sync", "one_step_off", "async"]}}
    assert "rollout.mode (one_step_off)" in refused(base, space=modes)
    sweep_of(base, space=modes, overrides={"placement.mode": "dedicated"}).base_config()
    assert "placement.mode" in refused(base, space={"placement.mode": {"choice": ["dedicated"]}})
    apart = {"placement.mode": {"engine": "dedicated"}}
    message = refused(base, share=["reward", "engine"], overrides=apart)
    assert message.startswith("share (['reward', 'engine']): dedicated roles")
    sweep_of(base, share=["reward"], overrides=apart).base_config()


def test_pbt_copies_checkpoints_so_there_must_be_some(base: Path):
    pbt = {"scheduler": {"kind": "pbt", "perturb_every": 5}, "searcher": "random"}
    assert "(eval.every). Set it to a multiple of that" in refused(base, **pbt)
    message = refused(base, **pbt, overrides={"eval.every": 5})
    assert message.startswith("checkpoint.every (10): pbt copies checkpoints every 5 steps")
    sweep_of(base, **pbt, overrides={"eval.every": 5, "checkpoint.every": 5}).base_config()
    assert "optuna cannot follow" in refused(base, scheduler="pbt")


def test_pbt_changes_only_what_a_checkpoint_can_go_on_under(base: Path):
    pbt = {"scheduler": "pbt", "searcher": "random"}
    optimizers = {"learner.optimizer": {"choice": ["adamw", "muon"]}}
    assert "space (learner.optimizer): pbt changes" in refused(base, **pbt, space=optimizers)
    workers = {"learner.num_workers": {"choice": [1, 2]}}
    message = "space.learner.num_workers: is the same for all trials"
    assert message in refused(base, space=workers)
    adaptive = {"ppo.kl": {"controller": "adaptive", "target": 1.0, "horizon": 1000}}
    assert "Search ppo.kl.target instead" in refused(base, **pbt, overrides=adaptive)


def test_the_folder_of_a_sweep_stands_for_its_sweep_file(base: Path, tmp_path: Path):
    sweep = sweep_of(base, num_samples=3)
    files = RunFiles(str(tmp_path / "runs"), "s")
    files.write_config(recorded_config(sweep, sweep.base_config()))

    again = SweepConfig.load(files.folder, ["num_samples=5"])

    assert again.num_samples == 5
    assert again.storage_path == str(tmp_path / "runs")
    check_sweep_folder(again, again.base_config(), files)


def test_a_base_may_be_of_any_recipe_that_samples_what_it_trains(base: Path):
    base.write_text(f"{BASE}recipe: rejection_sampling\n")
    space = {"rejection_sampling.top_k": {"choice": [1, 2]}, "learner.lr": {"uniform": [0, 1]}}
    config = sweep_of(base, space=space).base_config()
    assert isinstance(config, RejectionSamplingConfig)
    assert "space.ppo.kl.coef: the run config has no such key" in refused(base)
    message = refused(base, space=space, metric="kl/ref_mean")
    assert "has no reference" in message


EXAMPLES = "name: b\nrecipe: sft\nmodel: {policy: p}\ndata: {prompts: p.jsonl}\n"
RATE = {"learner.lr": {"loguniform": [1e-5, 1e-3]}}


def test_what_a_base_of_examples_cannot_have_is_refused(base: Path):
    base.write_text(EXAMPLES)
    assert "the base config has no evaluation" in refused(base, space=RATE)
    base.write_text(f"{EXAMPLES}eval: {{prompts: e.jsonl}}\nnum_epochs: 2\n")
    message = refused(base, space=RATE)
    assert message.startswith("num_epochs (2): trials are compared step by step")
    steps = {"num_steps": 30, "num_epochs": None}
    message = refused(base, space=RATE, overrides=steps)
    assert "metric (eval/score_mean): answers to held-out prompts are scored" in message
    goal = {"metric": "eval/loss", "mode": "min"}
    sweep_of(base, space=RATE, overrides=steps, **goal).base_config()
    message = refused(base, space=RATE, overrides=steps, share=["reference"], **goal)
    assert message.startswith("share (['reference']): trials of the recipe sft do not")


def test_keys_of_free_mappings_stay_as_they_are():
    values = {
        "placement": {"label_selector": {"ray.io/accelerator-type": "H100"}},
        "rollout": {"agent_args": {"weights": {1: 0.5}}},
    }
    assert with_values(values, {}) == values
    changed = with_values(values, {"rollout.agent_args": {"a.b": 1}, "ppo.kl.coef": 0.1})
    assert changed["placement"] == values["placement"]
    assert changed["rollout"] == {"agent_args": {"a.b": 1}}
    assert changed["ppo"] == {"kl": {"coef": 0.1}}
