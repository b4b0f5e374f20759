"""What may be said of a source of rows, and what is refused with a remedy."""

import pytest

from raypo.config import ConfigError, PPOConfig, SFTConfig, SourceEntry, functions_of, source_name
from tests.unit.config.test_run_config import assert_refused, refused, with_keys


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/gsm8k.jsonl", "gsm8k"),
        ("openai/gsm8k", "gsm8k"),
        ("data/math-*.parquet", "math"),
        ("data/chat/*.jsonl", "chat"),
        ("reasoning_gym://chain_sum?size=2000", "chain_sum"),
        ("s3://bucket/x.csv?region=eu", "x"),
        ("*", "data"),
        (SourceEntry(path="a.jsonl", name="mine"), "mine"),
    ],
)
def test_a_source_is_called_like_its_file_unless_it_is_named(source, name):
    assert source_name(source) == name


def test_sources_with_weights_and_functions_survive_the_round_trip():
    sources = [
        {"path": "math.jsonl", "weight": 0.7, "function": "judges.py:math"},
        {"path": "talk.jsonl", "weight": 0.3, "name": "chat"},
    ]
    config = PPOConfig.parse(with_keys(data__prompts=sources))
    assert PPOConfig.parse(config.model_dump(mode="json")) == config
    assert functions_of(config.data.prompts) == {"math": "judges.py:math"}


def test_patterns_and_functions_of_sources_become_absolute(tmp_path):
    for name in ("a.jsonl", "judges.py"):
        (tmp_path / name).write_text("")
    sources = ["*.jsonl", {"path": "a.jsonl", "function": "judges.py:math"}]
    made = PPOConfig.parse(with_keys(data__prompts=sources)).with_absolute_paths(tmp_path)
    assert made.data.prompts == (
        f"{tmp_path}/*.jsonl",
        SourceEntry(path=f"{tmp_path}/a.jsonl", function=f"{tmp_path}/judges.py:math"),
    )


@pytest.mark.parametrize(
    ("key", "sources", "named"),
    [
        ("data__prompts", [{"path": "a.jsonl", "weight": 1}, "b.jsonl"], "b.jsonl has no weight"),
        (
            "data__prompts",
            [{"path": "x/a.jsonl", "weight": 1}, {"path": "y/a.jsonl", "weight": 1}],
            "two sources have the name a",
        ),
        ("eval__prompts", {"path": "a.jsonl", "weight": 2}, "a.jsonl has a weight (2)"),
    ],
)
def test_what_could_not_act_or_be_told_apart_is_refused(key, sources, named):
    assert named in refused(**{key: sources})


def test_a_weight_is_more_than_nothing():
    assert_refused("data.prompts.0.weight", 0, data__prompts={"path": "a", "weight": 0})


def test_files_of_one_name_are_taken_together_where_nobody_tells_them_apart():
    config = PPOConfig.parse(with_keys(data__prompts=["x/a.jsonl", "y/a.jsonl"]))
    assert config.data.prompts == ("x/a.jsonl", "y/a.jsonl")


def test_a_function_of_rows_that_nobody_answers_is_refused():
    values = with_keys(data__prompts={"path": "a.jsonl", "function": "f.py:f"})
    with pytest.raises(ConfigError, match=r"data\.prompts\.function \(f\.py:f\): "):
        SFTConfig.parse({**values, "recipe": "sft"})
    held_out = with_keys(eval__prompts={"path": "a.jsonl", "function": "f.py:f"})
    assert SFTConfig.parse({**held_out, "recipe": "sft"}).needs_engine
