"""Recipes that go by rounds as whole runs: sample, judge, select, train, push."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from raypo import (
    DistillationConfig,
    DistillationTrainer,
    IterativeDPOConfig,
    IterativeDPOTrainer,
    RejectionSamplingConfig,
    RejectionSamplingTrainer,
)
from raypo.config import DataSection
from raypo.data.prompts import peek
from tests.integration.pipeline import rounds_values, write_examples
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds")
    write_examples(path)
    return path


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rejection_sampling(folder: Path, name: str, **changes: Any) -> list[dict[str, Any]]:
    values = rounds_values(folder, "rejection_sampling") | {"name": name} | changes
    RejectionSamplingTrainer(RejectionSamplingConfig.parse(values)).fit()
    return metrics_of(folder / "runs" / name)


@pytest.fixture(scope="module")
def whole(folder: Path, local_ray: None) -> list[dict[str, Any]]:
    return rejection_sampling(folder, "whole")


def test_rejection_sampling_learns_what_the_judge_likes(folder: Path, whole):
    assert whole[-1]["eval/score_mean"] > whole[0]["eval/initial_score_mean"] + 0.2
    for row in whole:
        assert row["selection/responses"] == 16
        assert row["selection/score_mean"] > row["rollout/score_mean"]
        assert row["train/updates"] == 4  # two epochs of two batches
        assert row["mismatch/probe_gap_max"] < 1e-3
    AutoModelForCausalLM.from_pretrained(folder / "runs/whole/policy")


def test_what_was_selected_is_a_data_set_for_sft(folder: Path, whole):
    file = folder / "runs/whole/selected/round_00002.parquet"
    assert (
        peek(
            DataSection(prompts=(str(file),), label_key="label"), response_keys={"key": "response"}
        )
        == 16
    )
    scores = pq.read_table(file)["score"].to_pylist()
    assert sum(scores) / 16 == pytest.approx(whole[1]["selection/score_mean"])


def test_iterative_dpo_learns_from_pairs_of_its_own_samples(folder: Path, local_ray: None):
    values = rounds_values(folder, "iterative_dpo") | {"dpo": {"sft_coef": 0.2}}
    IterativeDPOTrainer(IterativeDPOConfig.parse(values)).fit()
    rows = metrics_of(folder / "runs/iterative_dpo")
    assert rows[-1]["eval/score_mean"] > rows[0]["eval/initial_score_mean"] + 0.1
    for row in rows:
        assert row["selection/pairs"] + row["selection/prompts_without"] == 16
        assert row["train/examples"] == 2 * row["selection/pairs"]
        assert row["train/sft_loss"] > 0.0
        assert row["mismatch/probe_gap_max"] < 1e-3
    file = folder / "runs/iterative_dpo/pairs/round_00001.parquet"
    columns = {"one": "chosen", "other": "rejected"}
    assert (
        peek(DataSection(prompts=(str(file),), label_key="label"), response_keys=columns)
        == rows[0]["selection/pairs"]
    )


def test_distillation_comes_closer_to_its_teacher_on_its_own_samples_and_on_texts(
    folder: Path, local_ray: None
):
    teacher = tiny_policy(folder / "teacher", seed=1)
    values = rounds_values(folder, "distillation")
    values["model"] |= {"teacher": str(teacher)}
    values["data"] |= {"response_key": "response", "max_response_tokens": 8}
    values |= {"distillation": {"on_policy_fraction": 0.5, "top_k": 20}}
    del values["reward"]
    values["eval"]["function"] = "tests.integration.task:digit_share"
    DistillationTrainer(DistillationConfig.parse(values)).fit()
    rows = metrics_of(folder / "runs/distillation")
    assert rows[-1]["train/loss"] < 0.9 * rows[0]["train/loss"]
    for row in rows:
        assert row["rollout/samples_sampled"] == 8 * 4
        assert row["train/examples"] == 2 * 16 * 4  # two epochs; half of them are texts
        assert 0.0 < row["train/teacher_told"] < 1.0
        assert "rollout/score_mean" not in row
        assert row["mismatch/probe_gap_max"] < 1e-3


def test_a_teacher_with_other_tokens_is_refused_before_a_model_is_loaded(
    folder: Path, local_ray: None
):
    teacher = tiny_policy(folder / "other")
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"<unk>"', '"<what>"'))
    values: dict[str, Any] = rounds_values(folder, "distillation") | {"name": "other"}
    values["model"] |= {"teacher": str(teacher)}
    with pytest.raises(
        Exception, match=r"model\.teacher .* train on its texts with the recipe sft"
    ):
        DistillationTrainer(DistillationConfig.parse(values)).fit()
