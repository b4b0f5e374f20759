"""`raypo init` reads each argument of a script or command, or names what it cannot read."""

from typing import Any

import pytest

from raypo.config import ConfigError
from raypo.translation.reading import read_command, read_script
from raypo.translation.run_file import translate


@pytest.mark.parametrize(
    "definition",
    [
        'EXTRA="\n  a.kl=True\n  a.coef=0.1\n"',
        "EXTRA=(a.kl=True\n  a.coef=0.1)",
        'C=0.1\nEXTRA=(\n  a.kl=True\n)\nEXTRA+=(\n  a.coef="${C}"\n)',
        'BASE="a.kl=True"\nEXTRA="$BASE a.coef=0.1"',
    ],
)
def test_arguments_in_a_variable_are_read(definition: str):
    use = '"${EXTRA[@]}"' if "(" in definition else "$EXTRA"
    given = read_command(f"{definition}\npython3 -m verl.trainer.main_ppo {use} \\\n b.c=3", "verl")
    assert given == {"a.kl": True, "a.coef": 0.1, "b.c": 3}


def test_flags_of_openrlhf_in_a_variable_are_read():
    given = read_command(
        'KL="--use_kl_loss --kl_estimator k2"\nLOG=(--seed 3)\n'
        'python3 -m openrlhf.cli.train_ppo_ray --pretrain q ${KL} "${LOG[@]}" --l2 0.1',
        "OpenRLHF",
    )
    kl = {"use_kl_loss": True, "kl_estimator": "k2"}
    assert given == {"pretrain": "q", **kl, "seed": 3, "l2": 0.1}


def test_a_quoted_variable_stays_one_word():
    given = read_command('NAME="a run b.c=1"\nrun trainer.name="$NAME" "$NAME"', "verl")
    assert given == {"trainer.name": "a run b.c=1"}


@pytest.mark.parametrize(
    ("project", "command"),
    [
        ("verl", "$PYTHON -m verl.trainer.main_ppo $COMMON a.b=1 | tee $LOG"),
        ("OpenRLHF", "$PYTHON -m openrlhf.cli.train_ppo_ray $COMMON --l2 0.1 | tee $LOG"),
    ],
)
def test_an_unset_variable_of_arguments_is_a_note(project: str, command: str):
    text = translate(project, read_command(command, project))
    assert "# - $COMMON: its value is not in the command. Write its arguments into" in text
    assert "PYTHON" not in text
    assert "LOG" not in text


HUB = {"path": "a/b", "config": "c", "split": "train"}


@pytest.mark.parametrize(
    ("arguments", "source", "left"),
    [
        ("'a/b', split='train'", "a/b", []),
        ("path='a/b', name='c'", HUB, []),
        ("'a/b', 'c', 'd', split='train'", HUB, ["data_dir='d'"]),
        ("'a/b', name=None, revision='v2', split=s", "a/b", ["revision='v2'", "split=s"]),
        ("'a/b', data_files='x.jsonl'", "a/b", ["data_files='x.jsonl'"]),
        ("'json', data_files='t.jsonl', split='train'", ["t.jsonl"], []),
        ("'parquet', data_files=['a.parquet', 'b.parquet']", ["a.parquet", "b.parquet"], []),
        ("'csv', data_files={'x': 'x.csv', 'y': 'y.csv'}, split='y'", ["y.csv"], []),
        ("'json', data_files='t.jsonl', split='train[:9]'", ["t.jsonl"], ["split='train[:9]'"]),
    ],
)
def test_each_argument_of_load_dataset_is_in_the_source_or_a_note(
    arguments: str, source: Any, left: list[str]
):
    _, given = read_script(f"SFTTrainer('m', train_dataset=load_dataset({arguments}))")
    assert given.pop("train_dataset") == source
    assert {*given} == {"model", *(f"train_dataset, load_dataset({each})" for each in left)}


@pytest.mark.parametrize("arguments", ["'json', data_files='t.txt'", "'csv', data_files=f", "name"])
def test_a_source_that_is_not_known_is_left_to_be_set(arguments: str):
    recipe, given = read_script(f"SFTTrainer('m', train_dataset=load_dataset({arguments}))")
    text = translate("TRL", given, recipe)
    assert f"# - train_dataset (load_dataset({arguments})): data.prompts." in text
    assert "  - TODO" in text


@pytest.mark.parametrize("flag", ["--config-name=mine", "--config-path my/conf", "-cn mine"])
def test_a_yaml_of_verl_that_is_not_read_is_a_note(flag: str):
    command = f"python3 -m verl.trainer.main_ppo {flag} a.b=1"
    text = translate("verl", read_command(command, "verl"))
    assert f"# - {flag}: this YAML was not read, and verl's own defaults are assumed." in text


@pytest.mark.parametrize(
    "common",
    [
        "common = {'beta': 0.1, 'num_iterations': N}\n",
        "common = dict(beta=0.1, num_iterations=2)\n",
        "common: dict = {'beta': 0.1, 'num_iterations': 2}\n",
    ],
)
def test_arguments_in_a_dict_of_the_script_are_read(common: str):
    _, given = read_script(f"N = 2\n{common}GRPOTrainer('m', f, GRPOConfig('o/r', **common))")
    del given["reward_funcs"]
    assert given == {"model": "m", "output_dir": "o/r", "beta": 0.1, "num_iterations": 2}


@pytest.mark.parametrize(
    "common",
    ["common = load()\n", "common = {}\ncommon['beta'] = 1\n", "common = {}\ncommon.update(a)\n"],
)
def test_a_dict_that_cannot_be_read_is_a_note(common: str):
    recipe, given = read_script(f"{common}GRPOTrainer('m', f, trl.GRPOConfig(**common))")
    text = translate("TRL", given, recipe)
    assert "# - trl.GRPOConfig(**common): cannot be read. Set the keys of these arguments." in text


def test_attributes_that_a_script_sets_in_its_config_are_read():
    _, given = read_script(
        "other.beta = 9\nargs = GRPOConfig(beta=0.0)\nargs.beta = 0.1\nargs.max_steps *= 2\n"
        "rate = 5e-6\nargs.learning_rate = rate\nGRPOTrainer('m', f, args)"
    )
    assert (given["beta"], given["learning_rate"]) == (0.1, 5e-6)
    recipe, given = read_script("args = SFTConfig()\nargs.seed += 2\nSFTTrainer('m', args)")
    assert "# - seed (args.seed += 2): seed." in translate("TRL", given, recipe)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("GRPOTrainer('m', f, args, 'train', 'eval')", {"reward_funcs"}),
        ("DPOTrainer('m', None, args, None, 'train', 'eval', tokenizer)", {"ref_model"}),
        ("SFTTrainer('m', args, None, 'train', 'eval', tokenizer)", set()),
        ("RewardTrainer('m', args, train_dataset='train', eval_dataset='eval')", set()),
    ],
)
def test_positional_arguments_have_the_order_of_their_trainer(call: str, names: set[str]):
    kind = call.partition("Trainer")[0]
    _, given = read_script(f"args = {kind}Config(seed=3)\n{call}")
    given.pop("data_collator", None)
    assert {*given} == {"model", "train_dataset", "eval_dataset", "seed", *names}
    assert (given["train_dataset"], given["eval_dataset"]) == ("train", "eval")


def test_quotes_in_variables_and_brackets_in_quotes_of_an_array_are_read():
    said = 'MSG="don\'t stop"\necho $MSG\npython -m verl.trainer.main_ppo data.prompt_key=q'
    assert read_command(said, "verl") == {"data.prompt_key": "q"}
    array = (
        'A=(\n  data.x.y=":)"\n  data.prompt_key=q\n)\npython -m verl.trainer.main_ppo "${A[@]}"'
    )
    assert read_command(array, "verl") == {"data.x.y": ":)", "data.prompt_key": "q"}


@pytest.mark.parametrize("argument", ["*rest", "None, None, None, None, 'eighth'"])
def test_positional_arguments_that_cannot_be_read_are_notes(argument: str):
    recipe, given = read_script(f"SFTTrainer('m', SFTConfig(), {argument})")
    last = argument.rpartition(", ")[2]
    assert f"# - SFTTrainer({last}): cannot be read." in translate("TRL", given, recipe)


def test_a_config_that_the_script_does_not_create_is_a_note():
    recipe, given = read_script("_, args = parser.parse()\nSFTTrainer('m', args=args)")
    text = translate("TRL", given, recipe)
    assert "# - args=args: the script does not create this SFTConfig." in text


def test_a_script_with_two_trainers_is_refused():
    one, other = "SFTTrainer('a', args=SFTConfig(seed=3))", "GRPOTrainer('b', f)"
    with pytest.raises(ConfigError, match=r"SFTTrainer and GRPOTrainer, .* one of them"):
        read_script(f"{one}\n{other}")
    recipe, given = read_script(f"SFTConfig(seed=3)\n{other}")
    assert recipe == "ppo"
    assert "seed" not in given
