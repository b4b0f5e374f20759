"""Recipes that go by rounds, with other workers, shares, adapters and teachers than by default."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from raypo import (
    DistillationConfig,
    DistillationTrainer,
    RejectionSamplingConfig,
    RejectionSamplingTrainer,
)
from tests.integration.pipeline import rounds_values, write_examples
from tests.integration.task import numbers, read_metrics
from tests.slow.test_dpo import FAILS_ONCE
from tests.tiny import tiny_policy

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rounds")
    write_examples(path)
    return path


def rejection_sampling(
    folder: Path, name: str, *, learner: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    values = rounds_values(folder, "rejection_sampling") | {"name": name, "num_steps": 2} | changes
    values["learner"] |= learner or {}
    RejectionSamplingTrainer(RejectionSamplingConfig.parse(values)).fit()
    return read_metrics(folder / "runs" / name)


@pytest.fixture(scope="module")
def one_worker(folder: Path, local_ray: None) -> list[dict[str, Any]]:
    return rejection_sampling(folder, "one")


def test_shares_learn_and_push_what_one_worker_does(folder: Path, one_worker):
    shares = rejection_sampling(folder, "shares", learner={"num_workers": 2, "zero_stage": 3})
    assert all(row["mismatch/probe_gap_max"] < 1e-3 for row in [*one_worker, *shares])
    assert shares[0]["selection/score_mean"] == one_worker[0]["selection/score_mean"]
    assert shares[0]["train/loss"] == pytest.approx(one_worker[0]["train/loss"], rel=1e-4)
    assert shares[1]["eval/score_mean"] == pytest.approx(one_worker[1]["eval/score_mean"], abs=0.1)


def test_a_run_that_fails_goes_on_from_its_last_round_to_the_same_numbers(folder: Path, one_worker):
    judge = folder / "judge.py"
    judge.write_text(FAILS_ONCE)
    evaluation = rounds_values(folder, "rejection_sampling")["eval"]
    evaluation |= {"function": f"{judge}:digit_share_at_last"}
    rows = rejection_sampling(folder, "resumed", eval=evaluation, max_failures=1)
    assert len((folder / "calls").read_text()) == 4  # before, at 1, at 2 in vain, at 2
    assert numbers(rows) == numbers(one_worker)


def test_two_workers_with_an_adapter_select_the_same_and_may_leave_it_at_that(
    folder: Path, one_worker
):
    changes: dict[str, Any] = {
        "model": {"policy": f"{folder}/model", "lora": {"rank": 4}},
        "rejection_sampling": {"train": False},
    }
    (row,) = rejection_sampling(folder, "two", num_steps=1, learner={"num_workers": 2}, **changes)
    assert row["selection/score_mean"] == one_worker[0]["selection/score_mean"]
    assert row["train/updates"] == 0
    tables = [
        pq.read_table(folder / f"runs/{name}/selected/round_00001.parquet")
        for name in ("one", "two")
    ]
    assert tables[0].equals(tables[1])


def test_each_source_has_a_teacher_of_its_own(folder: Path):
    """Two deployments of the same weights teach what one does."""
    teachers = [str(tiny_policy(folder / name, seed=1)) for name in ("once", "again")]
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("few", rows[:16]), ("many", rows[16:])):
        (folder / f"{name}.jsonl").write_text("".join(part))
    losses = []
    each: dict[str, Any] = {
        "one": teachers[0],
        "two": {"few": teachers[0], "many": teachers[1]},
    }
    for name, teacher in each.items():
        values: dict[str, Any] = rounds_values(folder, "distillation")
        values |= {"name": f"teacher_{name}", "num_steps": 1}
        values["model"] |= {"teacher": teacher}
        values["data"]["prompts"] = [f"{folder}/few.jsonl", f"{folder}/many.jsonl"]
        DistillationTrainer(DistillationConfig.parse(values)).fit()
        (figures,) = read_metrics(folder / "runs" / values["name"])
        losses.append(figures["train/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_policy_teaches_itself_and_goes_on_to_the_same_numbers(folder: Path):
    """With its start as the teacher in a deployment, the first round learns the same."""

    def distillation(name: str, num_steps: int = 2, **changes: Any) -> list[dict[str, Any]]:
        values = rounds_values(folder, "distillation") | {"name": name, "num_steps": num_steps}
        values["learner"]["lr_schedule"] = "constant"  # a run may be lengthened
        for section, keys in changes.items():
            values[section] |= keys
        shown = {"teacher_prompt": f"{folder}/hints.py:hint", "max_teacher_prompt_tokens": 64}
        values |= {"distillation": {"top_k": 20, **shown}}
        DistillationTrainer(DistillationConfig.parse(values)).fit()
        return read_metrics(folder / "runs" / name)

    (folder / "hints.py").write_text(
        "def hint(samples):\n"
        "    return [None if s.score > 0.9 else '1234 ' + s.prompt for s in samples]\n"
    )
    whole = distillation("itself")
    assert all(0 < row["selection/responses"] <= 16 * 4 for row in whole)
    assert all(row["train/loss"] > 0 for row in whole)
    policy = rounds_values(folder, "distillation")["model"]["policy"]
    deployed = distillation("deployed", model={"policy": policy, "teacher": policy})
    assert whole[0]["train/loss"] == pytest.approx(deployed[0]["train/loss"], rel=1e-4)
    assert whole[1]["train/loss"] != pytest.approx(deployed[1]["train/loss"], rel=1e-4)
    distillation("halves", num_steps=1)
    assert numbers(distillation("halves")) == numbers(whole)
    workers = distillation("taught_shares", learner={"num_workers": 2, "zero_stage": 3})
    assert workers[0]["train/loss"] == pytest.approx(whole[0]["train/loss"], rel=1e-3)
