"""The command's exit status, and that wrong input is told before anything heavy is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raypo.cli

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text("name: run\nmodel: {policy: none/such/folder}\ndata: {prompts: no.jsonl}\n")
    return path


def exit_status(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["raypo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        raypo.cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_typo_in_an_override_is_status_2_with_the_nearest_key(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", config, "ppo.kl.cof=0.02") == 2
    assert "Did you mean ppo.kl.coef?" in capsys.readouterr().err


def test_a_missing_config_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", "nowhere.yaml") == 2
    assert "nowhere.yaml: there is no such file" in capsys.readouterr().err


def test_a_missing_model_is_status_2(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", config) == 2
    assert "model.policy (none/such/folder)" in capsys.readouterr().err


def test_an_unknown_command_is_status_2(monkeypatch: pytest.MonkeyPatch):
    assert exit_status(monkeypatch, "trian") == 2


def test_wrong_input_is_told_without_importing_anything_heavy(config: Path):
    code = (
        "import sys, raypo.cli\n"
        f"sys.argv = ['raypo', 'train', {str(config)!r}]\n"
        "try:\n    raypo.cli.main()\n"
        f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_wrong_sweep_file_is_told_without_importing_anything_heavy(config: Path):
    file = config.parent / "sweep.yaml"
    file.write_text(f"name: s\nbase: {config}\nspace: {{ppo.kl.cof: {{uniform: [0, 1]}}}}\n")
    code = (
        "import sys, raypo.cli\n"
        f"sys.argv = ['raypo', 'sweep', {str(file)!r}]\n"
        "try:\n    raypo.cli.main()\n"
        f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Did you mean ppo.kl.coef?" in done.stderr
    assert done.stdout.strip() == "[]"


def test_plan_says_what_fits_and_what_does_not_without_importing_anything_heavy(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def score(rollouts):\n    return []\n")
    config = tmp_path / "ppo.yaml"
    config.write_text(
        f"name: run\nmodel: {{policy: {tmp_path}}}\ndata: {{prompts: {tmp_path}/prompts.jsonl}}\n"
        f"reward: {{function: '{tmp_path}/reward.py:score'}}\n"
    )
    for cluster, status in (("4xCPU,16G", 0), ("4xCPU,2G", 2), ("4xGPU", 2)):
        code = (
            "import sys, raypo.cli\n"
            f"sys.argv = ['raypo', 'plan', {str(config)!r}, 'seed=3', '--cluster', {cluster!r}]\n"
            "try:\n    raypo.cli.main()\n"
            f"finally:\n    print([m for m in {HEAVY!r} if m in sys.modules])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stderr
        assert done.stdout.splitlines()[-1] == "[]"
        assert ("run fits." in done.stdout) == (status == 0)
        assert ("memory (node 0 RAM): needs" in done.stderr) == (cluster == "4xCPU,2G")
