import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raypo.config import (
    NUMBERS_DO_NOT_DEPEND_ON,
    CheckpointSection,
    ConfigError,
    EvalSection,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    SourceEntry,
    load_run_config,
)
from raypo.config.passwords import has_password, without_passwords

MINIMAL = {
    "name": "quick",
    "model": {"policy": "tiny"},
    "data": {"prompts": "prompts.jsonl"},
}
TEXT = "name: quick\nmodel: {policy: tiny}\ndata: {prompts: prompts.jsonl}\n"


def with_keys(**values):
    """MINIMAL with dotted keys (`__` for the dot) set."""
    tree = {key: dict(v) if isinstance(v, dict) else v for key, v in MINIMAL.items()}
    for key, value in values.items():
        *sections, last = key.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def refused(**values):
    with pytest.raises(ConfigError) as error:
        PPOConfig.parse(with_keys(**values), origin="run.yaml")
    return str(error.value)


def assert_refused(key, value, **others):
    """The error names the key and shows its value; the value is set at the key unless given."""
    text = refused(**(others or {key.replace(".", "__"): value}))
    assert f"{key} ({value}): " in text or f"{key} ({value!r}): " in text


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_the_fewest_workers_are_no_more_than_all():
    assert_refused("learner.min_workers", 3, learner__num_workers=2, learner__min_workers=3)
    assert_refused("learner.min_workers", 4, learner__num_workers=[4, 2])


def test_workers_share_rows_in_whole_groups():
    assert_refused("learner.sequence_parallel", 2, learner__sequence_parallel=2)
    text = refused(learner__sequence_parallel=2, learner__num_workers=2, learner__critic_workers=1)
    assert "must divide learner.critic_workers (1)" in text
    text = refused(learner__sequence_parallel=2, learner__num_workers=[2, 4])
    assert "learner.sequence_parallel (2): needs a fixed number of workers" in text
    text = refused(learner__sequence_parallel=2, learner__num_workers=2, model__attention="sdpa")
    assert "learner.sequence_parallel (2): needs raypo's own attention" in text


def test_workers_of_a_critic_that_share_rows_need_a_row_together():
    keys = {"rollout__prompts_per_step": 4, "ppo__minibatch_size": 4, "ppo__advantage": "gae"}
    keys |= {"learner__num_workers": 4, "learner__critic_workers": 4}
    assert "every worker needs a prompt" in refused(**keys)
    PPOConfig.parse(with_keys(**keys, learner__sequence_parallel=2))
    keys |= {"rollout__prompts_per_step": 3, "ppo__minibatch_size": 3}
    text = refused(**keys, learner__sequence_parallel=2)
    assert "every group of 2 workers needs a prompt" in text


def test_workers_that_share_rows_share_the_budget_of_a_pass_and_need_a_row_together():
    shared = {"learner__sequence_parallel": 2, "learner__num_workers": 4}
    lengths = {"data__max_prompt_tokens": 100, "rollout__max_new_tokens": 100}
    config = PPOConfig.parse(
        with_keys(
            **shared,
            **lengths,
            learner__max_tokens_per_microbatch=100,
            rollout__prompts_per_step=2,
            ppo__minibatch_size=2,
        )
    )
    assert config.learner.pass_tokens == 200
    text = refused(**shared, **lengths, learner__max_tokens_per_microbatch=99)
    assert "Set learner.max_tokens_per_microbatch to at least 100" in text
    text = refused(**shared, rollout__prompts_per_step=1, rollout__samples_per_prompt=1)
    assert "Set learner.num_workers to at most 2" in text


# Numbers


@pytest.mark.parametrize(
    "key", ["seed", "learner.policy_lr", "rollout.engine.count", "stop.after_s", "model.lora.rank"]
)
def test_a_boolean_is_no_number(key):
    assert_refused(key, True)


def test_a_boolean_in_a_list_or_an_entry_is_no_number():
    assert_refused("eval.pass_at", [True])
    entry = [{"path": "a.jsonl", "weight": True}]
    assert_refused("model.reward.0.weight", True, model__reward=entry)
    assert_refused("data.prompts.0.weight", True, data__prompts=entry)


def test_numbers_as_yaml_writes_them_and_booleans_where_they_belong_are_taken():
    """YAML reads 1e-5 as a text."""
    config = PPOConfig.parse(
        with_keys(learner__policy_lr="1e-5", learner__use_gpu=True, num_steps="3")
    )
    assert (config.learner.policy_lr, config.learner.use_gpu, config.num_steps) == (1e-5, True, 3)


# Unknown and missing keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ppo__clip_lo", "ppo.clip_low"),
        ("ppo__kll", "ppo.kl"),
        ("rollout__engine__counts", "rollout.engine.count"),
        ("coef", "ppo.kl.coef"),
        ("num_step", "num_steps"),
        ("ppo__kl_coef", "ppo.kl.coef"),
        ("learner__temperature", "rollout.temperature or eval.temperature"),
        ("temprature", "rollout.temperature or eval.temperature"),
        ("learner__lr", "learner.policy_lr or learner.critic_lr"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, nearest):
    dotted = key.replace("__", ".")
    assert refused(**{key: 1}) == (
        f"run.yaml: {dotted}: there is no such key. Did you mean {nearest}?"
    )


@pytest.mark.parametrize("key", ["zzz", "learner__use_fsdp", "ppo__kl__warm"])
def test_an_unknown_key_without_a_near_one_is_to_be_removed(key):
    assert refused(**{key: 1}).endswith("Remove it.")


def test_the_folder_of_a_run_stands_for_its_config_wherever_the_folder_lies_now(
    tmp_path, monkeypatch
):
    run = tmp_path / "moved" / "quick"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(TEXT + "storage_path: elsewhere\n")
    config = load_run_config(run, ["num_steps=7"])
    assert (config.storage_path, config.num_steps) == (str(tmp_path / "moved"), 7)
    (run / "policy").mkdir()
    monkeypatch.chdir(run / "policy")
    assert load_run_config("..").storage_path == str(tmp_path / "moved")


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_run_config(tmp_path)


def test_a_sweep_is_not_taken_for_a_run(tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("name: s\nbase: ppo.yaml\nspace: {ppo.kl.coef: [0, 1]}\n")
    with pytest.raises(ConfigError, match="raypo sweep "):
        load_run_config(file)


def test_a_required_key():
    with pytest.raises(ConfigError) as error:
        PPOConfig.parse({"name": "quick", "model": {}}, origin="run.yaml")
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == [
        "model.policy",
        "data",
    ]


# Data sets with a configuration and a split


@pytest.mark.parametrize(
    "override",
    [
        "data.prompts={path: openai/gsm8k, config: main, split: test}",
        "data.prompts=[{path: openai/gsm8k, config: main, split: test}]",
    ],
)
def test_a_data_set_takes_a_configuration_and_a_split_and_survives_the_round_trip(file, override):
    config = PPOConfig.load(file, [override])
    entry = SourceEntry(path="openai/gsm8k", config="main", split="test")
    assert config.data.prompts == (entry,)
    assert PPOConfig.parse(config.model_dump(mode="json")) == config
    assert config.with_absolute_paths() == config


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a/b", "splitt": "x"}, "splitt: "),
        ({"split": "x"}, "path: "),
        ({"path": "s3://b/a.csv", "split": "test"}, "split ('test'): "),
        ({"path": "a/b", "split": 3}, "split (3): "),
    ],
)
def test_a_wrong_data_set_is_one_mistake_with_its_key(entry, message):
    (line,) = refused(data__prompts=entry).splitlines()
    assert line.startswith(f"run.yaml: data.prompts.0.{message}")


def test_an_override_replaces_a_value_of_another_kind(file):
    """A list in the file by a section, a section by null, null by a key below it."""
    config = PPOConfig.load(
        file,
        ["data.prompts=[a.jsonl]", "data.prompts={path: a/b}", "model.lora={}", "model.lora=null"],
    )
    assert config.data.prompts == (SourceEntry(path="a/b"),)
    assert config.model.lora is None
    lora = PPOConfig.load(file, ["model.lora=null", "model.lora.rank=3"]).model.lora
    assert lora is not None
    assert lora.rank == 3


def test_overrides_of_one_section_add_up_and_the_last_of_a_key_wins(file):
    config = PPOConfig.load(
        file, ["ppo.kl={coef: 0.3}", "ppo.kl={estimator: k2, placement: loss}", "ppo.kl.coef=0.4"]
    )
    kl = config.ppo.kl
    assert (kl.coef, kl.estimator, kl.placement) == (0.4, "k2", "loss")


# Wrong values


def test_an_error_has_key_value_rule_and_remedy():
    assert refused(ppo__gamma=2) == (
        "run.yaml: ppo.gamma (2): must be less than or equal to 1. Set ppo.gamma to at most 1.0."
    )


def test_a_wrong_entry_of_a_list_is_named_by_its_place():
    assert_refused("data.prompts.1", 3, data__prompts=["a", 3])


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".hidden", "a b"])
def test_a_name_is_one_folder(name):
    assert refused(name=name).startswith(f"run.yaml: name ({name!r}): ")


def test_all_mistakes_are_told_at_once():
    assert len(refused(ppo__gamma=2, zzz=1, seed=-1).splitlines()) == 3


def test_all_rules_that_are_broken_are_told_at_once():
    """Within a section and between sections, each with the name of the file."""
    lines = refused(ppo__nll_min_score=0.5, ppo__cispo_low=0.1).splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "run.yaml: ppo.cispo_low",
        "run.yaml: ppo.nll_min_score",
    ]
    lines = refused(ppo__minibatch_size=30, rollout__mode="one_step_off").splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "run.yaml: rollout.mode",
        "run.yaml: ppo.minibatch_size",
    ]


# Rules between keys


@pytest.mark.parametrize(("wrong", "right"), [(30, 16), (7, 4), (1000, 128), (127, 64)])
def test_minibatches_divide_a_step_and_the_nearest_smaller_divisor_is_proposed(wrong, right):
    text = refused(ppo__minibatch_size=wrong)
    assert text.startswith(f"run.yaml: ppo.minibatch_size ({wrong}): ")
    assert text.endswith(f"Set ppo.minibatch_size to {right}.")
    PPOConfig.parse(with_keys(ppo__minibatch_size=right))


def test_every_worker_has_work():
    assert refused(learner__num_workers=33).endswith("Set learner.num_workers to at most 32.")


def test_the_longest_sequence_fits_a_microbatch():
    assert_refused("learner.max_tokens_per_microbatch", 319)
    PPOConfig.parse(with_keys(learner__max_tokens_per_microbatch=320))


@pytest.mark.parametrize("name", ["optimizer", "scheduler", "gradient_accumulation_steps"])
def test_keys_of_deepspeed_that_raypo_sets_are_refused(name):
    value = {"type": "WarmupLR"}
    assert_refused(f"learner.deepspeed.{name}", value, learner__deepspeed={name: value})


@pytest.mark.parametrize("stage", [0, 1])
def test_communication_that_deepspeed_cannot_overlap_is_refused(stage):
    wrong = ("learner.deepspeed.zero_optimization.overlap_comm", True)
    overlaps = {"zero_optimization": {"overlap_comm": True}}
    assert_refused(*wrong, learner__zero_stage=stage, learner__deepspeed=overlaps)
    with_stage = {"zero_optimization": {"overlap_comm": True, "stage": stage}}
    assert_refused(*wrong, learner__zero_stage=3, learner__deepspeed=with_stage)
    PPOConfig.parse(with_keys(learner__deepspeed=overlaps))  # at the usual stage, 2
    not_set = {"zero_optimization": {"overlap_comm": False}}
    PPOConfig.parse(with_keys(learner__zero_stage=stage, learner__deepspeed=not_set))


@pytest.mark.parametrize(("name", "lowest"), [("offload_optimizer", 1), ("offload_param", 3)])
def test_an_offload_that_deepspeed_would_ignore_or_that_needs_nvme_is_refused(name, lowest):
    def problem(offload, stage):
        zero = {"zero_optimization": {name: offload}}
        keys = with_keys(learner__zero_stage=stage, learner__deepspeed=zero)
        try:
            PPOConfig.parse(keys)
        except ConfigError as error:
            return str(error)
        return ""

    key = f"learner.deepspeed.zero_optimization.{name}"
    for stage in range(4):
        assert (f"{key}.device (cpu)" in problem({"device": "cpu"}, stage)) is (stage < lowest)
        assert problem({"device": "none"}, stage) == problem(None, stage) == ""
        assert f"{key}.device (nvme)" in problem({"device": "nvme"}, stage)
    assert f"{key} (cpu): must be a mapping" in problem("cpu", 3)


@pytest.mark.parametrize("name", ["cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"])
def test_deepspeeds_former_keys_of_an_offload_are_refused(name):
    """They would pass by the rules of the present ones, and by the plan of memory."""
    zero = {"zero_optimization": {name: True}}
    key = f"learner.deepspeed.zero_optimization.{name}"
    assert_refused(key, True, learner__zero_stage=3, learner__deepspeed=zero)
    zero["zero_optimization"][name] = False
    PPOConfig.parse(with_keys(learner__deepspeed=zero))


def test_a_wrong_zero_optimization_is_refused():
    key = "learner.deepspeed.zero_optimization"
    assert_refused(key, None, learner__deepspeed={"zero_optimization": None})
    assert_refused(f"{key}.stage", 4, learner__deepspeed={"zero_optimization": {"stage": 4}})


# Files and overrides


@pytest.mark.parametrize(
    "overrides",
    [
        {
            "ppo.kl.coef": 0.02,
            "data.prompts": ["a.jsonl", "b.csv"],
            "learner.deepspeed": {"x": {"y": 1}},
        },
        ["ppo.kl.coef=0.02", "data.prompts=[a.jsonl,b.csv]", "learner.deepspeed.x.y=1"],
    ],
)
def test_overrides_by_mapping_and_by_text_win_over_the_file(file, overrides):
    config = PPOConfig.load(file, overrides)

    assert config.ppo.kl.coef == 0.02
    assert config.data.prompts == ("a.jsonl", "b.csv")
    assert config.learner.deepspeed == {"x": {"y": 1}}
    assert config.model.policy == "tiny"


@pytest.mark.parametrize("text", ["ppo.kl.coef", "=3", "--fresh"])
def test_an_override_without_key_and_value(file, text):
    with pytest.raises(ConfigError, match=f"{text!r} is not an override"):
        PPOConfig.load(file, [text])


def test_paths_may_begin_with_the_folder_of_the_file(tmp_path, monkeypatch):
    folder = tmp_path / "mine"
    folder.mkdir()
    keys = {"data": {"prompts": "${dir}/x.jsonl"}, "reward": {"function": "${dir}/f.py:good"}}
    values = with_keys(model__policy="${dir}/policy") | keys
    (folder / "run.yaml").write_text(yaml.safe_dump(values))

    for file in (folder / "run.yaml", "mine/run.yaml"):
        monkeypatch.chdir(tmp_path)
        config = PPOConfig.load(file, ["eval.prompts=${dir}/held_out.jsonl"])
        where = Path(file).parent
        assert config.model.policy == f"{where}/policy"
        assert config.data.prompts == (f"{where}/x.jsonl",)
        assert config.reward.function == f"{where}/f.py:good"
        assert config.eval.prompts == (f"{where}/held_out.jsonl",)

    (folder / "run.yaml").write_text(yaml.safe_dump(values | {"dir": "elsewhere"}))
    with pytest.raises(ConfigError, match="dir: "):
        PPOConfig.load(folder / "run.yaml")


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: "):
        PPOConfig.load(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["a: [1,", "a: 1\na: 2\n", "a: ${no.such.key}", "- a\n- b\n"])
def test_a_file_that_is_no_yaml(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path / "run.yaml")):
        PPOConfig.load(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nseed: 1\nname: b\n", "name: is given twice, in lines 1 and 3"),
        (
            "ppo:\n  kl:\n    coef: 1\n    coef: 2\n",
            "coef: is given twice, in lines 3 and 4",
        ),
        ("ppo: {gamma: 1}\n\nppo: {kl: {coef: 2}}\n", "ppo: is given twice, in lines 1 and 3"),
    ],
)
def test_a_key_that_is_given_twice_is_told_with_both_lines(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        PPOConfig.load(tmp_path / "run.yaml")


# Frozen, comparable, light


def test_differences_are_told_by_key_and_what_numbers_do_not_depend_on_is_ignored():
    mine = PPOConfig.parse(MINIMAL)
    theirs = PPOConfig.parse(
        with_keys(ppo__kl__coef=0.5, seed=1, storage_path="other", cluster__namespace="x")
    )
    assert mine.differences(theirs, ignore=NUMBERS_DO_NOT_DEPEND_ON) == [
        "ppo.kl.coef: 0.01 -> 0.5",
        "seed: 0 -> 1",
    ]
    assert mine.differences(mine) == []


def test_checkpoints_and_evaluations_are_due_every_so_often_and_at_the_last_step():
    for section in (CheckpointSection(every=3), EvalSection(every=3)):
        assert [s for s in range(1, 8) if section.is_due(s, last_step=7)] == [3, 6, 7]


def test_importing_the_config_imports_nothing_heavy():
    code = (
        "import sys, raypo, raypo.config\n"
        "heavy = ('torch', 'ray', 'vllm', 'transformers', 'deepspeed', 'pyarrow', 'pandas')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"learner__num_workers": 31}, "learner.num_workers + learner.critic_workers = 33"),
        (
            {
                "learner__save_critic": True,
                "checkpoint__best_by": "rollout/score_mean",
                "storage_path": "s3://bucket/runs",
            },
            "Set checkpoint.best_by to null",
        ),
    ],
)
def test_what_workers_of_a_critic_cannot_have_is_refused(keys: dict, words: str):
    PPOConfig.parse(with_keys(learner__critic_workers=2))
    text = refused(learner__critic_workers=2, **keys)
    assert "learner.critic_workers (2): " in text
    assert words in text


def test_failures_are_counted_as_ray_counts_them_and_may_change_when_a_run_goes_on():
    assert PPOConfig.parse(with_keys()).max_failures == 0
    unlimited = PPOConfig.parse(with_keys(max_failures=-1))
    earlier = PPOConfig.parse(with_keys())
    assert unlimited.differences(earlier, ignore=NUMBERS_DO_NOT_DEPEND_ON) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"learner__lr_warmup_steps": 40}, "Set learner.lr_warmup_steps to at most 39"),
        ({"learner__lr_warmup_steps": 10, "ppo__critic_warmup_steps": 30}, "in 10 steps"),
    ],
)
def test_what_an_optimizer_cannot_have_is_refused(keys, words):
    assert words in refused(**keys)


def test_a_warm_up_of_a_critic_that_is_trained_alone_is_measured_by_its_own_steps():
    alone = {"num_steps": 9, "ppo__critic_warmup_steps": 9, "learner__save_critic": True}
    PPOConfig.parse(with_keys(**alone, learner__lr_warmup_steps=8))
    assert "in 9 steps (num_steps)" in refused(**alone, learner__lr_warmup_steps=9)


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({}, 0),
        ({"rollout__mode": "one_step_off"}, 0),
        ({"rollout__mode": "async", "rollout__max_staleness": 2}, 3),
        ({"ppo__filter__enabled": True, "rollout__samples_per_prompt": 4}, 1),
    ],
)
def test_a_curriculum_waits_for_the_steps_that_may_still_be_sampled(keys: dict, steps: int):
    if "rollout__mode" in keys:
        keys = keys | {"placement__mode": {"engine": "dedicated"}}
    config = PPOConfig.parse(with_keys(rollout__prompts_per_step=8, ppo__minibatch_size=4, **keys))
    assert config.draws_in_flight == 8 * steps


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model__lora": {}}, "learner.optimizer (muon): updates whole matrices"),
        ({"learner__critic_workers": 1}, "learner.critic_workers (1): is not supported"),
        (
            {
                "learner__deepspeed": {
                    "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "stage": 2}
                }
            },
            "learner.deepspeed.zero_optimization.offload_optimizer",
        ),
    ],
)
def test_what_muon_cannot_have_is_refused(keys: dict, words: str):
    assert PPOConfig.parse(with_keys(learner__optimizer="muon")).learner.optimizer == "muon"
    assert words in refused(learner__optimizer="muon", **keys)


def test_all_keys_that_are_left_to_the_user_are_told_at_once():
    values = with_keys(name="TODO", data__prompts=["TODO"], ppo__kl__coef="TODO")
    with pytest.raises(ConfigError) as error:
        PPOConfig.parse(values, origin="run.yaml")
    (line,) = str(error.value).splitlines()
    assert line.startswith("run.yaml: name, data.prompts, ppo.kl.coef (TODO): ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("storage_path", "s3://KEY:pa/ss@bucket/runs"),
        ("storage_path", "s3://bucket/runs?access_key=a&secret_key=pass"),
        ("data__prompts", ["abfs://data/x.jsonl?sig=pass"]),
        ("reward__url", "http://user:pass@host:8000/score"),
        ("rollout__engine__extra", {"hf_token": "pass"}),
    ],
)
def test_a_password_in_a_run_file_is_refused_because_the_run_would_record_it(key: str, value):
    text = refused(**{key: value})
    assert f"{key.replace('__', '.')}" in text
    assert "has a password or key, which the run's files would show" in text
    assert "pass@" not in text


def test_addresses_without_a_password_stay():
    for path in ("s3://bucket/runs?region=eu", "hdfs://user@host:9000/a", "gs://a/b@c"):
        assert PPOConfig.parse(with_keys(storage_path=path)).storage_path == path
    for address in ("http://h:8000?u=a@b", "http://h:8000#a@b", "http://h/score?label_key=answer"):
        assert not has_password("reward.url", address)
        assert without_passwords(address) == address


@pytest.mark.parametrize("value", ["EMPTY", "", "dummy", "none"])
def test_a_placeholder_of_a_key_stays(value: str):
    keys = {"rollout__agent": "agent.py:Agent", "rollout__max_episode_tokens": 64}
    arguments = {"api_key": value}
    config = PPOConfig.parse(with_keys(**keys, rollout__agent_args=arguments))
    assert config.rollout.agent_args == arguments
    assert has_password("rollout.agent_args.api_key", "sk-1")


@pytest.mark.parametrize(
    "option", ["api_key", "apikey", "AccountKey", "aws_secret_key", "key", "token", "x.sig-token"]
)
def test_keys_in_the_options_of_a_uri_are_found(option: str):
    address = f"http://h:8000/score?a=1&{option}=pass"
    assert has_password("reward.url", address)
    assert "pass" not in without_passwords(address)


@pytest.mark.parametrize(
    ("values", "limit_s"),
    [
        ({}, 1890.0),  # the default of reward.timeout_s is as long, and has to be reached first
        ({"placement.hang_timeout_s": 300.0}, 300.0),
        ({"placement.hang_timeout_s": 3600.0}, 3600.0),
        ({"placement.hang_timeout_s": None, "reward.timeout_s": 3600.0}, None),
        ({"reward.timeout_s": 3600.0}, 3780.0),
        ({"eval.timeout_s": 3600.0}, 3780.0),
        ({"placement.deployment.stall_timeout_s": 3600.0}, 3780.0),
        ({"reward.timeout_s": None, "eval.timeout_s": 60.0}, 1800.0),
    ],
)
def test_work_with_a_limit_of_its_own_does_not_hang_before_it(values, limit_s):
    tree = with_keys(**{key.replace(".", "__"): value for key, value in values.items()})
    assert PPOConfig.parse(tree).hang_limit_s == limit_s


def test_recipes_on_examples_have_the_limits_of_their_own_sections():
    tree = {"name": "run", "model": {"policy": "tiny"}, "data": {"prompts": "rows.jsonl"}}
    assert SFTConfig.parse(tree).hang_limit_s == 1890.0  # eval.timeout_s
    assert RewardModelConfig.parse(tree).hang_limit_s == 1800.0
