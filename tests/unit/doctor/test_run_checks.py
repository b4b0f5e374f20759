"""Inputs, fit and folder of a run: the checks of other commands, as results of the doctor."""

import json
from pathlib import Path
from typing import Any

import pytest

from raypo.cluster.hardware import Node, parse_cluster
from raypo.config import AnyConfig, parse_run_config
from raypo.doctor import run_checks as doctor_run_checks
from raypo.doctor.result import Result, run_checks
from raypo.doctor.run_checks import checkpoint_bytes, input_checks, reward_check
from tests.tiny import tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    tiny_policy(folder / "policy")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder: Path, **sections: Any) -> AnyConfig:
    values: dict[str, Any] = {
        "name": "run",
        "storage_path": str(folder / "runs"),
        "model": {"policy": str(folder / "policy")},
        "data": {
            "prompts": str(folder / "rows.jsonl"),
            "label_key": "answer",
            "max_prompt_tokens": 8,
        },
        "reward": {"function": "raypo.rewards.verifiers:exact_match"},
        "rollout": {"prompts_per_step": 8},
    }
    return parse_run_config(values | sections, origin="test")


def results_of(config: AnyConfig, nodes: list[Node]) -> dict[str, Result]:
    """Results by check, without that of the models, which imports torch."""
    checks = input_checks(config, lambda: nodes, is_here=True)
    return {
        result.check: result
        for result in run_checks([check for check in checks if check.name != "models"])
    }


ROOM = parse_cluster("4xCPU,64G")


def test_a_run_that_can_start(folder: Path):
    results = results_of(config_of(folder), ROOM)
    assert {name: result.status for name, result in results.items()} == {
        "inputs": "ok",
        "fit": "ok",
        "run folder": "ok",
    }
    assert results["fit"].found.startswith("node 0 RAM: ")
    assert not (folder / "runs").exists()


def test_a_file_that_is_missing(folder: Path):
    data = {"prompts": str(folder / "other.jsonl"), "max_prompt_tokens": 8}
    result = results_of(config_of(folder, data=data), ROOM)["inputs"]
    assert result.status == "fault"
    assert result.found.startswith(f"data.prompts ({folder}/other.jsonl): ")
    assert result.remedy


def test_a_setting_that_is_rarely_intended(folder: Path):
    rollout = {"prompts_per_step": 64}
    result = results_of(config_of(folder, rollout=rollout), ROOM)["inputs"]
    assert result.status == "warning"
    assert "prompts repeat within a step" in result.found


def test_a_run_that_does_not_fit(folder: Path):
    result = results_of(config_of(folder), parse_cluster("4xCPU,0.2G"))["fit"]
    assert result.status == "fault"
    assert result.found.startswith("memory (node 0 RAM): needs ")


def test_the_nodes_of_a_cluster_are_unknown_without_cluster(folder: Path):
    result = results_of(config_of(folder), [])["fit"]
    assert (result.status, "add --cluster" in result.found) == ("skipped", True)


def test_a_run_folder_of_another_program(folder: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    result = results_of(config_of(folder, storage_path=str(tmp_path)), ROOM)["run folder"]
    assert result.status == "fault"
    assert "metrics.jsonl" in result.found


def test_checkpoints_need_room_for_those_kept_and_one_more(folder: Path):
    one = checkpoint_bytes(config_of(folder, checkpoint={"keep": 1}), ROOM)
    assert one > 0
    assert checkpoint_bytes(config_of(folder, checkpoint={"keep": 3}), ROOM) == 2 * one


def test_a_reward_function_is_tried_if_there_is_one(folder: Path):
    def names(**sections: Any) -> list[str]:
        return [
            check.name
            for check in reward_check(config_of(folder, **sections), Path("run.yaml"), [])
        ]

    assert names() == ["reward function"]
    assert names(reward={"url": "http://127.0.0.1:1/s"}, eval={"function": "a.py:score"}) == []
    rollout = {"environment": "play.py:Play", "max_episode_tokens": 64}
    assert names(rollout=rollout) == []  # its environment scores
    assert names(reward={"url": "http://127.0.0.1:1/score"}) == []
    sft_data = {"prompts": str(folder / "rows.jsonl"), "response_key": "answer"}
    values = {"recipe": "sft", "name": "run", "model": {"policy": str(folder / "policy")}}
    config = parse_run_config(values | {"data": sft_data}, origin="test")
    assert reward_check(config, Path("run.yaml"), []) == []


def test_a_reward_function_that_ends_its_process_without_a_word(folder: Path, tmp_path: Path):
    (tmp_path / "score.py").write_text("import os\nos.kill(os.getpid(), 11)\n")
    path = tmp_path / "run.yaml"
    config = config_of(folder, reward={"function": f"{tmp_path}/score.py:score"})
    path.write_text(config.to_yaml())
    (result,) = run_checks(reward_check(config, path, []))
    assert (result.status, result.found) == ("fault", "it ended with status -11")


def test_kernels_for_cpus_are_no_question_while_the_nodes_are_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[AnyConfig] = []
    monkeypatch.setattr(doctor_run_checks, "check_models", lambda config: None)
    monkeypatch.setattr(doctor_run_checks, "check_kernels", asked.append)
    doctor_run_checks._models(config_of(folder), [])
    assert asked == []
    doctor_run_checks._models(config_of(folder), [{"CPU": 4.0}])
    assert len(asked) == 1
