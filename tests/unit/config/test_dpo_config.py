import pytest

from raypo.config import ConfigError, DPOConfig

RUN = {
    "recipe": "dpo",
    "name": "r",
    "model": {"policy": "p"},
    "data": {"prompts": "pairs.jsonl"},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dpo": {"label_smoothing": 0.5}}, "less than 0.5"),
        ({"data.ref_chosen_key": "c"}, "data.ref_rejected_key.*for both"),
        (
            {"data.max_response_tokens": 2000, "learner.max_tokens_per_microbatch": 2300},
            r"data.max_prompt_tokens \+ 2 x data.max_response_tokens",
        ),
        ({"eval.prompts": "a.jsonl"}, r"eval.prompts \(a.jsonl\): no function scores.*eval.pairs"),
    ],
)
def test_what_has_no_effect_is_refused(change, words):
    values = {section: dict(v) if isinstance(v, dict) else v for section, v in RUN.items()}
    for key, value in change.items():
        section, _, name = key.partition(".")
        if name:
            values[section] = {**values.get(section, {}), name: value}  # type: ignore[dict-item]
        else:
            values[section] = value
    with pytest.raises(ConfigError, match=words):
        DPOConfig.parse(values)


def test_held_out_prompts_need_one_function_of_any_source():
    own = {"path": "a.jsonl", "function": "judge.py:score"}
    for evaluation in (
        {"prompts": [own]},
        {"prompts": "a.jsonl", "function": "judge.py:score"},
        {"pairs": "a.jsonl"},
    ):
        assert DPOConfig.parse({**RUN, "eval": evaluation}).measures_held_out


def test_held_out_metrics_are_those_of_pairs_or_of_answers_that_somebody_judges():
    best = {**RUN, "checkpoint": {"best_by": "eval/loss"}}
    assert DPOConfig.parse({**best, "eval": {"pairs": "held_out.jsonl"}}).measures_held_out
    with pytest.raises(ConfigError, match=r"checkpoint.best_by \(eval/loss\): is measured on held"):
        DPOConfig.parse({**best, "eval": {"prompts": "held_out.jsonl"}})
