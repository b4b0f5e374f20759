"""A run's policy in Ray Data LLM: many prompts, answered and scored as a stream."""

from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

from raypo.serving.vllm_settings import DEFAULTS, EAGER


def answered(row: dict[str, Any]) -> dict[str, Any]:
    text = row["generated_text"]
    score = sum(c.isdigit() for c in text) / max(len(text), 1)
    return {"prompt": row["prompt"], "response": text, "score": score}


def test_its_answers_have_the_score_of_raypo_eval(first: SimpleNamespace, task: Path):
    processor = build_processor(
        vLLMEngineProcessorConfig(
            model_source=str(first.folder / "policy"),
            engine_kwargs={
                "dtype": "float32",
                "max_model_len": 64,
                "kv_cache_memory_bytes": 10**8,
                "enforce_eager": True,
            },
            placement_group_config={"bundles": [{"CPU": 1}]},
            runtime_env={"env_vars": DEFAULTS | EAGER},
            chat_template_stage=False,
            log_engine_metrics=False,  # they import Ray Serve, whose packages may be missing
            tokenize_stage=False,
            detokenize_stage=False,
        ),
        preprocess=lambda row: {
            **row,
            "sampling_params": {"temperature": 0.0, "max_tokens": 8},
        },
        postprocess=answered,
    )
    rows = ray.data.read_json(str(task.parent / "held_out.jsonl"))
    answers = processor(rows).take_all()
    assert len(answers) == 6
    evaluated = first.metrics[-1]
    assert evaluated["step"] == 4
    scores = [each["score"] for each in answers]
    assert mean(scores) == pytest.approx(evaluated["eval/score_mean"])
    assert evaluated["eval/score_mean"] > 0
