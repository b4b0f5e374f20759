"""GRPO of a mixture of experts as whole runs; the other recipes are in tests/slow."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration import experts
from tests.integration.task import numbers, read_metrics

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experts.write(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def test_resumed_it_has_the_numbers_of_the_run_that_never_stopped(folder: Path):
    whole = read_metrics(experts.fit(folder, "grpo", "float32"))
    experts.fit(folder, "grpo", "float32", name="halves", num_steps=1)
    run = experts.fit(folder, "grpo", "float32", name="halves")
    assert numbers(read_metrics(run)) == numbers(whole)
    assert all(row["mismatch/probe_gap_max"] < 1e-3 for row in whole)
    assert all(row["mismatch/log_prob_gap_max"] < 1e-3 for row in whole)
    assert all(1.0 <= row["ppo/router_load_max"] <= 2.0 for row in whole)  # two of four experts

    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (folder / "model", run / "policy")
    )
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert experts.gap_of_plain_vllm(run / "policy") < 1e-3


def test_in_bfloat16_they_agree_better_with_the_engines_experts(
    tmp_path_factory: pytest.TempPathFactory,
):
    """Both runs sample the same in their first step. Many experts have many near ties."""
    changes = {"num_experts": 32, "norm_topk_prob": True}
    many = experts.write(tmp_path_factory.mktemp("many"), "qwen3_moe", **changes)
    rows = []
    for replay in ("off", "engine"):
        section = experts.values(many, "grpo", "bfloat16")["rollout"]
        section |= {"router_replay": replay, "max_new_tokens": 32}
        run = experts.fit(many, "grpo", "bfloat16", name=replay, rollout=section)
        rows.append(read_metrics(run))
    (without, *_), (replayed, *later) = rows
    assert without["rollout/score_mean"] == replayed["rollout/score_mean"]
    gap = without["mismatch/log_prob_gap_mean"]
    assert 0.0 < replayed["mismatch/log_prob_gap_mean"] < 0.6 * gap
    assert "mismatch/router_disagreement" not in without
    for row in (replayed, *later):
        assert 0.0 < row["mismatch/router_disagreement"] < 0.2


def test_in_bfloat16_engine_and_learner_agree_within_rounding(folder: Path):
    (row,) = read_metrics(experts.fit(folder, "grpo", "bfloat16", num_steps=1))
    assert row["mismatch/log_prob_gap_mean"] < 0.02
    assert row["mismatch/probe_gap_mean"] < 0.02
