"""`raypo init` reads each argument of a script or command, or names what it cannot read."""

from typing import Any

import pytest

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
