"""Whole PPO runs through PPOTrainer: real Ray Train, real vLLM, real DeepSpeed, a tiny model."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.train import RunConfig, ScalingConfig

from raypo import PPOConfig, PPOTrainer
from raypo.storage.run_files import RunFiles
from tests.integration.task import (
    digit_share,
    read_metrics,
)

pytestmark = pytest.mark.usefixtures("local_ray")

PHASES = (
    "time/generate_s",
    "time/score_s",
    "time/log_probs_s",
    "time/save_rollouts_s",
    "time/update_s",
    "time/push_weights_s",
    "time/held_out_s",
    "time/checkpoint_s",
    "time/report_s",
)
COLUMNS = [
    "prompt",
    "response",
    "label",
    "prompt_ids",
    "response_ids",
    "log_probs",
    "ref_log_probs",
    "score",
    "scores_by_source",
    "advantage_mean",
    "kl",
    "finish_reason",
    "weight_version",
    "prompt_index",
]
"""Of a rollout's row."""
WORKING = ("generate", "score", "log_probs", "update")
"""Phases in which models compute."""


def test_every_step_is_in_the_metrics_and_in_the_result(first: SimpleNamespace):
    assert [row["step"] for row in first.metrics] == [1, 2, 3, 4]
    assert first.result.metrics_dataframe["step"].tolist() == [1, 2, 3, 4]
    assert first.result.return_value == {"status": "finished", "step": 4}
    with first.result.checkpoint.as_directory() as directory:
        said = (Path(directory) / "README.txt").read_text()
        assert f"the trained model is a Hugging Face folder in {first.folder}" in said
    for name in (
        "rollout/score_mean",
        "rollout/response_tokens_mean",
        "ppo/policy_loss",
        "ppo/value_loss",
        "ppo/clip_fraction",
        "ppo/approx_kl",
        "ppo/entropy",
        "kl/ref_mean",
        "kl/ref_response_mean",
        "mismatch/kl",
        "perf/response_tokens_per_s",
        "perf/samples_per_s",
        *(f"perf/{phase}_{unit}_per_s" for phase in WORKING for unit in ("samples", "tokens")),
        *(f"perf/memory_{role}_gb" for role in ("driver", "learner", "engine", "reference")),
    ):
        assert all(name in row for row in first.metrics), name
    assert [row["step"] for row in first.metrics if "eval/score_mean" in row] == [2, 4]


def test_every_file_and_folder_of_a_run_has_the_mode_that_the_umask_gives(first: SimpleNamespace):
    umask = os.umask(0)
    os.umask(umask)
    paths = [first.folder, *first.folder.rglob("*")]
    assert len(paths) > 20
    for path in paths:
        mode = (0o777 if path.is_dir() else 0o666) & ~umask
        assert oct(path.stat().st_mode & 0o777) == oct(mode), path


def test_the_phases_add_up_to_the_step(first: SimpleNamespace):
    for row in first.metrics:
        assert sum(row[name] for name in PHASES) == pytest.approx(row["time/step_s"], rel=0.02)


def test_how_much_of_the_devices_arithmetic_was_used(first: SimpleNamespace):
    for row in first.metrics:
        flops = [row[f"perf/{phase}_mfu"] * row[f"time/{phase}_s"] for phase in WORKING]
        assert sum(flops) == pytest.approx(row["perf/mfu"] * row["time/step_s"])
        assert 0.0 < row["perf/mfu"] < 1.0
        assert row["rollout/staleness_max"] == row["rollout/staleness_mean"] == 0.0


def test_the_policy_starts_at_the_reference_and_leaves_it(first: SimpleNamespace):
    kl = [row["kl/ref_response_mean"] for row in first.metrics]
    assert kl[0] == pytest.approx(0.0, abs=1e-5)
    assert kl[-1] > 1e-3


def test_engine_and_learner_agree_after_every_push(first: SimpleNamespace):
    assert all(0.0 < row["mismatch/probe_gap_max"] < 1e-3 for row in first.metrics)
    assert all(row["mismatch/log_prob_gap_max"] < 1e-3 for row in first.metrics)


def test_rollouts_account_for_every_sample(first: SimpleNamespace):
    import pyarrow.parquet as pq

    for row in first.metrics:
        table = pq.read_table(first.folder / "rollouts" / f"step_{row['step']:05d}.parquet")
        assert set(COLUMNS) <= set(table.column_names)
        rows = table.to_pylist()
        assert len(rows) == row["rollout/samples_sampled"] == row["rollout/samples_trained"] == 32
        assert len({(r["group_index"], r["sample_index"]) for r in rows}) == 32
        assert {r["weight_version"] for r in rows} == {row["step"] - 1}
        assert all(len(r["response_ids"]) == len(r["ref_log_probs"]) for r in rows)
        mean = sum(r["score"] for r in rows) / len(rows)
        assert mean == pytest.approx(row["rollout/score_mean"])


def test_held_out_samples_are_kept_with_what_the_evaluation_said(first: SimpleNamespace):
    files = RunFiles.at(str(first.folder))
    assert files.rollout_steps(held_out=True) == [0, 2, 4]
    said = {
        row["step"]: row["eval/score_mean"] for row in first.metrics if "eval/score_mean" in row
    }
    said[0] = first.metrics[0]["eval/initial_score_mean"]
    for step, mean in said.items():
        rows = files.rollouts(step, held_out=True)
        assert [row["group_index"] for row in rows] == list(range(6))
        assert {row["weight_version"] for row in rows} == {step}
        assert sum(row["score"] for row in rows) / 6 == pytest.approx(mean)


def test_the_saved_policy_is_a_trained_hugging_face_folder(first: SimpleNamespace, task: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(task.parent / "policy")
    after = AutoModelForCausalLM.from_pretrained(first.folder / "policy")
    AutoTokenizer.from_pretrained(first.folder / "policy")
    changed = [
        not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)
    ]
    assert all(changed)


def test_plain_vllm_serves_the_saved_policy(first: SimpleNamespace):
    code = (
        "from vllm import LLM, SamplingParams\n"
        f"llm = LLM({str(first.folder / 'policy')!r}, dtype='float32', enforce_eager=True,"
        " max_model_len=64, kv_cache_memory_bytes=2**26)\n"
        "params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)\n"
        "print('tokens:', len(llm.generate('1+1=', params)[0].outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "tokens: 4" in done.stdout, done.stderr


def test_a_finished_run_says_so_and_is_handed_back_without_being_run(
    first: SimpleNamespace, task: Path, capsys: pytest.CaptureFixture[str]
):
    before = (first.folder / "metrics.jsonl").stat().st_mtime_ns
    result = PPOTrainer(PPOConfig.load(task)).fit()
    assert "raypo: tiny is finished" in capsys.readouterr().out
    assert (first.folder / "metrics.jsonl").stat().st_mtime_ns == before
    assert result.metrics_dataframe is not None
    assert result.metrics_dataframe["step"].tolist() == [1, 2, 3, 4]


def test_python_arguments_win_and_are_recorded(task: Path, tmp_path: Path):
    """Two workers, ZeRO-3, a function from Python: the first step is that of one worker."""
    trainer = PPOTrainer(
        PPOConfig.load(task, {"num_steps": 1, "learner.zero_stage": 3}),
        reward_funcs=lambda rollouts: digit_share(rollouts),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="two", storage_path=str(tmp_path)),
    )
    trainer.fit()
    assert trainer.config.learner.num_workers == 2
    assert trainer.config.storage_path == str(tmp_path)
    assert "lambda" in (trainer.config.reward.function or "")
    (step,) = read_metrics(tmp_path / "two")
    one_worker = read_metrics(task.parent / "runs" / "tiny")[0]
    for name in ("rollout/score_mean", "ppo/policy_loss", "ppo/value_loss", "ppo/approx_kl"):
        assert step[name] == pytest.approx(one_worker[name], rel=1e-4, abs=1e-6), name
