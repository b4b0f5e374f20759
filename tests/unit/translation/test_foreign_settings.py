"""`raypo init` reads settings: resolved configs and one plain command, and nothing that is run."""

import json
from pathlib import Path

import pytest

from raypo.config import ConfigError
from raypo.translation.foreign_settings import read_source

MAIN = "python3 -m verl.trainer.main_ppo"


def given(text: str) -> dict[str, object]:
    return dict(read_source(text).arguments)


@pytest.mark.parametrize(
    "text",
    [
        f"{MAIN} a.b=1 'c.d=[1,2]' e.f=\"x y\"",
        f"{MAIN} \\\n  a.b=1 \\\n  'c.d=[1,2]' \\\n  e.f='x y'\n",
        f"#!/bin/bash\n# a comment\nset -x\n\n{MAIN} a.b=1 c.d=[1,2] 'e.f=x y' $@\n",
        f"X=1 HYDRA=0 nohup {MAIN} a.b=1 c.d=[1,2] 'e.f=x y' > log 2>&1 &",
        f"+ {MAIN} +a.b=1 ++c.d=[1,2] 'e.f=x y' 2>&1 | tee -a run.log",
        f"{MAIN} a.b=1 'c.d=[1,2]' 'e.f=x y' \\\n",
        f"{MAIN} --config-path=config --config-name=ppo_megatron_trainer.yaml a.b=1 c.d=[1,2] "
        "e.f='x y'",
        "ray job submit --address=x -- python verl/trainer/main_ppo.py a.b=1 c.d=[1,2] 'e.f=x y'",
        "a.b=1 c.d=[1,2] 'e.f=x y'",
    ],
)
def test_one_plain_command_of_verl_is_read(text: str):
    source = read_source(text)
    assert (source.project, source.recipe, source.is_complete) == ("verl", "ppo", False)
    assert source.arguments == {"a.b": 1, "c.d": [1, 2], "e.f": "x y"}


def test_one_plain_command_of_openrlhf_is_read():
    source = read_source(
        "deepspeed --module openrlhf.cli.train_ppo_ray --pretrain q --bf16 --eps 0.1 0.2 --l2=3"
    )
    assert source.project == "OpenRLHF"
    assert source.arguments == {"pretrain": "q", "bf16": True, "eps": [0.1, 0.2], "l2": 3}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"N=8\n{MAIN} a.b=1", "several commands"),
        (f"{MAIN} a.b=1 && echo", "several commands"),
        (f"{MAIN} a.b=1\n{MAIN} a.b=2", "several commands"),
        (f"if true; then\n{MAIN} a.b=1\nfi", "several commands"),
        (f"{MAIN} a.b=$N", "a variable"),
        (f'{MAIN} a.b="x $N"', "a variable"),
        (f"{MAIN} a.b=`date`", "a variable"),
        (f"{MAIN} a.b=1 # c.d=2", "a comment"),
        (f"{MAIN} a.b=1 \\\n # e.f=2 \\\n c.d=2", "a comment"),
        (f"A=(1 2) {MAIN} a.b=1", "parentheses"),
        (f"{MAIN} a.b={{1,2}}", "braces"),
    ],
)
def test_what_needs_a_shell_is_refused_with_the_line_that_resolves_it(text: str, what: str):
    with pytest.raises(ConfigError) as error:
        read_source(text)
    assert f"the command: has {what}" in str(error.value)
    assert "bash -xc '" in str(error.value)
    assert "--cfg job --resolve" in str(error.value)


def test_the_line_that_resolves_a_script_writes_its_command(tmp_path: Path):
    import re
    import subprocess

    script = tmp_path / "run.sh"
    script.write_text(f"N=${{N:-8}}\nif [ $N = 8 ]; then\n  {MAIN} a.b=$N 'c.d=x y'\nfi\n")
    with pytest.raises(ConfigError) as error:
        read_source(str(script))
    (line,) = re.findall(r"bash -xc .*? > command.txt", str(error.value))
    subprocess.run(line, shell=True, cwd=tmp_path, check=True, executable="/bin/bash")
    assert given(str(tmp_path / "command.txt")) == {"a.b": 8, "c.d": "x y"}


def test_a_space_behind_a_backslash_is_refused_with_its_line():
    with pytest.raises(ConfigError, match="the command: line 2 ends in a backslash and a space"):
        read_source(f"{MAIN} \\\n a.b=1 \\ \n c.d=2")


@pytest.mark.parametrize(
    "main", ["verl.trainer.fsdp_sft_trainer", "recipe.prime.main_prime", "openrlhf.cli.train_dpo"]
)
def test_other_programs_are_refused(main: str):
    with pytest.raises(ConfigError, match=rf"the command \({main}\): only commands of verl"):
        read_source(f"torchrun --nnodes 1 -m {main} a.b=1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{MAIN} --config-path=mine a.b=1", r"--config-path mine\): this YAML is not in"),
        (f"{MAIN} ~a.b", r"\(~a.b\): is not an override"),
        (f"{MAIN} a.b='x", "No closing quotation"),
        ("none.sh", "there is no such file"),
        ("echo hello", r"\(no known program\): only commands"),
        (MAIN, "it contains no argument of verl"),
    ],
)
def test_what_is_no_command_is_refused(text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        read_source(text)


def test_a_program_is_not_read(tmp_path: Path):
    (tmp_path / "train.py").write_text("GRPOConfig(beta=1)")
    with pytest.raises(ConfigError, match=r"programs and pickles are not .*json.dump\(args.to_"):
        read_source(str(tmp_path / "train.py"))


def test_a_config_of_trl_is_told_by_its_fields(tmp_path: Path):
    file = tmp_path / "args.json"
    for field, recipe in (("scale_rewards", "ppo"), ("packing", "sft"), ("ld", None)):
        file.write_text(json.dumps({field: 1}))
        if recipe:
            assert read_source(str(file)).recipe == recipe
        else:
            with pytest.raises(ConfigError, match="fields of no known config"):
                read_source(str(file))


def test_a_config_of_verl_is_read_with_its_interpolations(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "algorithm: {adv_estimator: grpo}\ndata: {n: 3}\n"
        "actor_rollout_ref: {rollout: {n: '${data.n}', m: '${unknown:1}'}, _target_: x}\n"
    )
    source = read_source(str(file))
    assert source.is_complete
    assert source.arguments["actor_rollout_ref.rollout.n"] == 3
    assert source.arguments["actor_rollout_ref.rollout.m"] == "${unknown:1}"
    assert "actor_rollout_ref._target_" not in source.arguments
    file.write_text("model: {a: 1}\n")  # of verl's SFT
    with pytest.raises(ConfigError, match="is not the config of verl's main_ppo"):
        read_source(str(file))
