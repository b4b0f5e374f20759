"""dpo as whole runs: from pairs and from verdicts, with an adapter."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo import DPOConfig, DPOTrainer
from raypo.collectives import Workers
from raypo.config import DPOSection, ExamplesLearnerSection, LoraSection
from raypo.learner.preference_tasks import PreferenceTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import load_causal_lm
from raypo.models.lora import add_adapter
from raypo.types import Pair
from tests.integration.pipeline import dpo_values, write_examples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dpo")
    write_examples(path)
    return path


def fit(folder: Path, name: str, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A run's folder and its metrics."""
    values = dpo_values(folder, **changes.pop("learner", {})) | {"name": name} | changes
    DPOTrainer(DPOConfig.parse(values)).fit()
    return folder / "runs" / name, metrics_of(folder / "runs" / name)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(folder: Path, local_ray: None) -> tuple[Path, list[dict[str, Any]]]:
    return fit(folder, "whole")


def test_dpo_tells_chosen_from_rejected_on_held_out_pairs(whole):
    run, rows = whole
    first, last = rows[0], rows[-1]
    assert first["eval/initial_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert first["eval/initial_accuracy"] == pytest.approx(0.5, abs=0.5)
    assert last["eval/accuracy"] > 0.9
    assert last["eval/margin_mean"] > 0.3
    assert last["eval/chosen_reward_mean"] > last["eval/rejected_reward_mean"]
    assert 0.0 <= last["eval/score_mean"] <= 1.0
    assert last["mismatch/probe_gap_max"] < 1e-3
    AutoModelForCausalLM.from_pretrained(run / "policy")


def test_the_reference_is_asked_once_of_every_pair(whole):
    run, _ = whole
    table = pq.read_table(run / "reference.parquet")
    assert table.num_rows == 48 + 16
    assert max(table["first"].to_pylist()) < 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_with_its_adapter_off_a_trained_policy_says_what_its_reference_said(
    folder: Path, group: None, stage: Literal[0, 3]
):
    torch.manual_seed(0)
    network = load_causal_lm(str(folder / "model"), dtype="float32")
    task = PreferenceTask(add_adapter(network, LoraSection(rank=4)), DPOSection())
    learner = SupervisedLearner(
        task,
        ExamplesLearnerSection(lr=1e-2, zero_stage=stage, max_tokens_per_microbatch=16),
        dtype="float32",
        num_steps=3,
        workers=Workers(),
    )
    ids = [np.asarray(row, np.int32) for row in ([5, 6], [7, 8, 2], [9, 2])]
    pairs = [Pair(ids[0], ids[1], ids[2]), Pair(ids[1], ids[2], ids[0])]
    before = learner.without_adapter(pairs, task.log_probs)
    pairs = [replace(p, ref_log_probs=each) for p, each in zip(pairs, before, strict=True)]
    losses = [learner.update(pairs, step=step)["train/loss"] for step in (1, 2, 3)]
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-5)
    assert losses[2] < losses[0]
    assert learner.without_adapter(pairs, task.log_probs) == before


def test_kto_learns_from_verdicts_with_an_adapter_on_two_workers(folder: Path, local_ray: None):
    model = {"policy": f"{folder}/model", "lora": {"rank": 8}}
    evaluation = {"pairs": f"{folder}/held_out.jsonl"}  # no engine
    changes = {"model": model, "dpo": {"loss": "kto", "beta": 0.3}, "eval": evaluation}
    run, rows = fit(folder, "kto", learner={"num_workers": 2}, **changes)
    assert rows[-1]["eval/loss"] < rows[0]["eval/initial_loss"] == pytest.approx(0.5, abs=1e-4)
    assert rows[-1]["eval/accuracy"] > 0.7
    assert rows[-1]["train/kl"] >= 0.0
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
