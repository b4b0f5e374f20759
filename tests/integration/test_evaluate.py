"""`raypo eval` as a user has it: of a run by its own config, of any folder by one that is named."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.task import raypo

TIMEOUT_S = 300


def evaluated(to: Path, *arguments: str | Path) -> dict[str, Any]:
    """What the command writes; its table goes to standard output."""
    command = raypo("eval", *arguments, "--to", to)
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 0, error
    assert "source" in out
    return json.loads(to.read_text())


def test_a_run_is_judged_as_its_own_last_evaluation_judged_it(
    first: SimpleNamespace, task: Path, tmp_path: Path
):
    said = evaluated(tmp_path / "eval.json", first.folder)
    assert said["model"] == str(first.folder / "policy")
    figures = said["results"][str(task.parent / "held_out.jsonl")]
    assert figures["eval/prompts"] == 6.0
    for name in ("eval/score_mean", "eval/response_tokens_mean", "eval/failed"):
        assert figures[name] == pytest.approx(first.metrics[-1][name]), name
