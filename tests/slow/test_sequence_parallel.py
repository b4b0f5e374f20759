"""Workers that share the tokens of their rows: four of them, and whole runs that change how many.

Two workers of every recipe: tests/integration/test_sequence_parallel.py.
"""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from raypo import PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from tests.integration.recipe_learners import Case
from tests.integration.sequence_probe import outcomes
from tests.integration.task import numbers, read_metrics, write_task
from tests.integration.test_sequence_parallel import assert_equal_passes, passes_of
from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers, together
from tests.tiny import tiny_experts, tiny_policy

CASES = [("float32", stage) for stage in range(4)] + [("bfloat16", 3)]
APART = [Case("apart", "float32", 2)]


def test_four_workers_compute_the_passes_of_one(tmp_path: Path):
    shared = passes_of(tmp_path, 4)
    for which, alone in outcomes(None).items():
        assert_equal_passes(shared[which], alone)


def test_groups_of_two_and_four_agree_with_one_worker_and_resume_each_other(tmp_path: Path):
    """There are two query heads, so four workers add heads of zeros."""
    tiny_policy(tmp_path / "policy")
    keys: dict[str, Any] = {"checkpoints": str(tmp_path)}
    one = run_workers(tmp_path, 1, CASES, matrix=together(APART), **keys)
    for size, resumed in (
        (2, []),
        (4, [(f"{dtype}_{stage}_1", dtype, stage) for dtype, stage in CASES]),
    ):
        four = run_workers(
            tmp_path,
            4,
            CASES,
            matrix=APART if size == 2 else [],
            resume=resumed,
            learner={"num_workers": 4, "critic_workers": 0, "sequence_parallel": size},
            **keys,
        )
        for case in CASES:
            assert_agrees_with_one_worker(one[case], four[case], *case)
            assert_agrees_with_one_worker(one[case]["second"], four[case]["second"], *case)
        for name, dtype, stage in resumed:
            assert_agrees_with_one_worker(one[dtype, stage]["second"], four[name], dtype, stage)
        for case in APART if size == 2 else ():
            assert_agrees_with_one_worker(
                one[together([case])[0]], four[case], case.dtype, case.stage, apart=True
            )


def test_experts_of_shared_rows_count_each_token_once(tmp_path: Path):
    tiny_experts(tmp_path / "policy", "qwen3_moe")
    keys = {"router_aux_coef": 0.1}
    one = run_workers(tmp_path, 1, CASES[2:3], learner=keys)
    shared = {"num_workers": 2, "sequence_parallel": 2, **keys}
    two = run_workers(tmp_path, 2, CASES[2:3], learner=shared)
    assert "ppo/router_aux_loss" in one[CASES[2]]["figures"]
    assert_agrees_with_one_worker(one[CASES[2]], two[CASES[2]], *CASES[2])


def assert_equal_rows(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for row, other in zip(mine, theirs, strict=True):
        for name, value in other.items():
            assert row[name] == pytest.approx(value, rel=1e-2, abs=1e-3), (row["step"], name)


@pytest.mark.usefixtures("local_ray")
def test_a_run_of_ppo_with_a_critic_goes_on_with_one_worker(tmp_path: Path):
    task = write_task(tmp_path)

    def run(name: str, num_steps: int, **learner: Any) -> Path:
        keys = [f"learner.{key}={value}" for key, value in learner.items()]
        keys += [f"name={name}", f"num_steps={num_steps}", "checkpoint.every=1"]
        result = PPOTrainer(PPOConfig.load(task, keys)).fit()
        assert result.return_value == {"status": "finished", "step": num_steps}
        return tmp_path / "runs" / name

    alone = run("alone", 3)
    run("shared", 2, num_workers=2, sequence_parallel=2)
    shared = run("shared", 3)
    assert_equal_rows(numbers(read_metrics(shared)), numbers(read_metrics(alone)))
    samples = pd.read_parquet(shared / "rollouts" / "step_00001.parquet")
    assert len(samples) == 32  # each of them once


@pytest.mark.usefixtures("local_ray")
def test_a_run_of_sft_goes_on_with_workers_that_share_rows(tmp_path: Path):
    tiny_policy(tmp_path / "policy")
    rows = [{"prompt": f"{n}+1=", "response": "9" * (1 + 5 * n % 13)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, num_steps: int, **learner: Any) -> list[dict[str, Any]]:
        config = SFTConfig.parse(
            {
                "name": name,
                "num_steps": num_steps,
                "storage_path": str(tmp_path / "runs"),
                "model": {"policy": str(tmp_path / "policy"), "lora": {"rank": 4}},
                "data": {"prompts": str(tmp_path / "rows.jsonl"), "max_response_tokens": 16},
                "eval": {"prompts": str(tmp_path / "rows.jsonl"), "every": 1},
                "learner": {"lr": 1e-2, "lr_schedule": "constant", "batch_size": 4, **learner},
                "checkpoint": {"every": 1},
            }
        )
        SFTTrainer(config).fit()
        return numbers(read_metrics(tmp_path / "runs" / name))

    alone = run("alone", 4)
    run("shared", 2)
    shared = run("shared", 4, num_workers=2, sequence_parallel=2, zero_stage=3)
    assert_equal_rows(shared, alone)
