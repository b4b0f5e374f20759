"""Every recipe on mixtures of experts: pushed, resumed, exported, and read by plain vLLM."""

import json
from pathlib import Path

import pytest

from tests.integration import experts
from tests.integration.experts import ARCHITECTURES, DTYPES, RECIPES
from tests.integration.task import numbers, read_metrics
from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers
from tests.tiny import tiny_experts

STEPS = [("float32", 0), ("float32", 2), ("float32", 3)]
"""Dtype and ZeRO stage."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experts.write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_is_resumed_and_its_export_is_what_plain_vllm_and_transformers_read(
    folder: Path, recipe: str, dtype: str
):
    experts.fit(folder, recipe, dtype, num_steps=1)
    run = experts.fit(folder, recipe, dtype)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    group = "train" if recipe in ("sft", "dpo") else "ppo"
    for row in rows:
        assert 1.0 <= row[f"{group}/router_load_max"] <= 2.0  # two of four experts
        assert 0.0 < row[f"{group}/router_entropy"] < 1.387  # ln 4
    gaps = [row["mismatch/probe_gap_max"] for row in rows if "mismatch/probe_gap_max" in row]
    assert gaps
    assert max(gaps) < {"float32": 1e-3, "bfloat16": 0.3}[dtype]
    assert experts.gap_of_plain_vllm(run / "policy") < 1e-3


@pytest.mark.usefixtures("local_ray")
def test_a_resumed_ppo_run_replays_the_experts_of_the_batch_that_was_sampled_ahead(tmp_path: Path):
    """The critic has routers too, which choose their own experts."""
    folder = experts.write(tmp_path, "qwen3_moe", num_experts=32, norm_topk_prob=True)
    section = experts.values(folder, "ppo", "bfloat16")["rollout"]
    section |= {"router_replay": "engine", "mode": "one_step_off"}
    keys = {"rollout": section, "placement": {"mode": {"engine": "dedicated"}}, "num_steps": 3}
    whole = read_metrics(experts.fit(folder, "ppo", "bfloat16", name="whole", **keys))
    at_once = {"metric": "rollout/score_mean", "at": -1.0}
    run = experts.fit(folder, "ppo", "bfloat16", name="halves", stop=at_once, **keys)
    assert [row["step"] for row in read_metrics(run)] == [1]
    assert list(run.rglob("rollouts_ahead.npz"))
    experts.fit(folder, "ppo", "bfloat16", name="halves", **keys)
    for row, expected in zip(numbers(read_metrics(run)), numbers(whole), strict=True):
        trained = [name for name in expected if name.startswith(("ppo/", "mismatch/", "kl/"))]
        assert [(name, row[name]) for name in trained] == [(n, expected[n]) for n in trained]
    assert all(0.0 < row["mismatch/router_disagreement"] < 0.2 for row in whole)


def test_a_step_that_balances_the_experts_is_that_of_one_worker(tmp_path: Path):
    tiny_experts(tmp_path / "policy", "qwen3_moe")
    one, two = (
        run_workers(tmp_path, count, STEPS, learner={"router_aux_coef": 0.5}) for count in (1, 2)
    )
    for case in STEPS:
        assert one[case]["figures"]["ppo/router_aux_loss"] > 2.0
        assert_agrees_with_one_worker(one[case], two[case], *case)
