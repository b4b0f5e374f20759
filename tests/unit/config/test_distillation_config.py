"""What a distillation's run file may say."""

from pathlib import Path

import pytest

from raypo.config import ConfigError, DistillationConfig, IterativeDPOConfig

VALUES = {
    "name": "d",
    "model": {"policy": "student", "teacher": "teacher"},
    "data": {"prompts": "p.jsonl"},
}
TEXTS = {"data": {"prompts": "p.jsonl", "response_key": "text"}}


def parsed(**changes: object) -> DistillationConfig:
    return DistillationConfig.parse(VALUES | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"policy": "student"}}, "model.teacher .None.: a policy learns nothing from"),
        ({"distillation": {"teacher_prompt": "solution"}}, "Set data.label_key"),
        (
            {"distillation": {"teacher_prompt": "success"}, "rollout": {"samples_per_prompt": 1}},
            "rollout.samples_per_prompt to 2",
        ),
        ({"distillation": {"teacher_prompt": "other"}}, "distillation.teacher_prompt"),
        (
            TEXTS | {"distillation": {"teacher_prompt": "a.py:f", "on_policy_fraction": 0.5}},
            "works only with samples of the policy. Set distillation.on_policy_fraction to 1",
        ),
        (
            {
                "data": {"prompts": "p", "tools_key": "tools"},
                "distillation": {"teacher_prompt": "a.py:f"},
            },
            "data.tools_key .tools.",
        ),
        (
            {
                "model": {"policy": "student"},
                "distillation": {"teacher_prompt": "a.py:f"},
                "learner": {"max_tokens_per_microbatch": 600},
            },
            "max_tokens_per_microbatch to at least 1088",
        ),
        ({"model": VALUES["model"] | {"critic": "c"}}, "model.critic: there is no such key"),
        ({"distillation": {"on_policy_fraction": 0.5}}, "distillation.on_policy_fraction"),
        (
            TEXTS | {"distillation": {"on_policy_fraction": 0.01}},
            "that is 0. Set distillation.on_policy_fraction to 0",
        ),
        (
            TEXTS | {"distillation": {"on_policy_fraction": 0.99}},
            "that is 32. Set distillation.on_policy_fraction to 1",
        ),
        (
            TEXTS | {"distillation": {"on_policy_fraction": 0}, "reward": {"function": "f.py:f"}},
            "reward.function .f.py:f.: ",
        ),
        (
            {
                "data": {"prompts": "p", "response_key": "text", "max_response_tokens": 9000},
                "distillation": {"on_policy_fraction": 0.0},
                "learner": {"max_tokens_per_microbatch": 4096},
            },
            "max_tokens_per_microbatch to at least 9256",
        ),
        (
            {"placement": {"frozen": {"reference": {"tensor_parallel": 2, "backend": "vllm"}}}},
            "placement.frozen.reference.tensor_parallel",
        ),
    ],
)
def test_what_cannot_act_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        parsed(**changes)


def test_who_judges_held_out_answers_alone_is_no_mistake():
    config = parsed(
        **TEXTS,
        distillation={"on_policy_fraction": 0},
        reward={"function": "judge.py:score"},
        eval={"prompts": "held_out.jsonl"},
    )
    assert (config.prompts_answered, config.reward.function) == (0, "judge.py:score")


def taught(teacher: dict[str, str]) -> DistillationConfig:
    sources = ["sums.jsonl", {"path": "x.jsonl", "name": "products"}, "words.jsonl"]
    return parsed(model={"policy": "student", "teacher": teacher}, data={"prompts": sources})


def test_a_teacher_of_two_sources_is_deployed_once():
    config = taught({"sums": "one", "words": "other", "products": "one"})
    assert config.references == {"reference_0": "one", "reference_1": "other"}
    assert taught(dict.fromkeys(config.teacher_of, "one")).references == {"reference": "one"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["sums", "x", "words"], "model.teacher .x.: no source .* names are sums, products, words"),
        (["sums", "words"], "model.teacher .sums, words.: the source products .* has no teacher"),
    ],
)
def test_each_source_has_a_teacher(names, message):
    with pytest.raises(ConfigError, match=message):
        taught(dict.fromkeys(names, "t"))


def test_the_path_of_each_teacher_is_made_absolute(tmp_path: Path):
    (tmp_path / "here").mkdir()
    relative = taught({"sums": "here", "words": "hub/id", "products": "here"})
    config = relative.with_absolute_paths(tmp_path)
    assert config.model.teacher == {
        "sums": f"{tmp_path}/here",
        "words": "hub/id",
        "products": f"{tmp_path}/here",
    }


def test_the_teacher_tells_log_probs_at_temperature_1_however_it_is_sampled():
    changes = {
        "rollout": {"temperature": 0.7},
        "placement": {"frozen": {"reference": {"backend": "vllm"}}},
    }
    assert parsed(**changes).trained_temperature == 1.0


def test_prompts_are_shared_out_between_the_policy_and_the_texts():
    data = {"prompts": "p.jsonl", "response_key": "text"}
    changes = {"data": data, "distillation": {"on_policy_fraction": 0.25}}
    assert parsed(**changes).prompts_answered == 8


def test_iterative_dpo_deploys_the_reference_model_if_it_compares_with_the_start():
    values = {
        "name": "i",
        "model": {"policy": "student", "reference": "other"},
        "data": {"prompts": "p.jsonl"},
        "rollout": {"samples_per_prompt": 2},
    }
    config = IterativeDPOConfig.parse(values | {"iterative_dpo": {"reference": "start"}})
    assert config.references == {"reference": "other"}


def test_a_policy_that_teaches_itself_needs_no_deployment():
    config = parsed(model={"policy": "p"}, distillation={"teacher_prompt": "success"})
    assert config.references == {}
    assert config.reference is None
    assert config.own_functions == {}
    named = parsed(distillation={"teacher_prompt": "hints.py:hint"})
    assert named.own_functions == {"distillation.teacher_prompt": "hints.py:hint"}
    assert named.references == {"reference": "teacher"}
