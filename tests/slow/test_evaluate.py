"""`raypo eval` of a folder, with the prompts of a config from several sources."""

import json
from pathlib import Path

import pytest

from tests.integration.test_evaluate import evaluated


def test_a_folder_is_judged_by_source_with_the_prompts_of_a_config(task: Path, tmp_path: Path):
    sources = [str(task.parent / f"{name}.jsonl") for name in ("held_out", "prompts")]
    said = evaluated(
        tmp_path / "eval.json",
        task.parent / "policy",
        "--config",
        task,
        f"eval.prompts={json.dumps(sources)}",
        "eval.samples_per_prompt=2",
        "eval.pass_at=[1,2]",
    )
    held_out, prompts, both = (said["results"][name] for name in (*sources, "all"))
    assert [each["eval/prompts"] for each in (held_out, prompts, both)] == [6.0, 24.0, 30.0]
    for name in ("eval/score_mean", "eval/pass_at_1", "eval/pass_at_2"):
        joined = (6 * held_out[name] + 24 * prompts[name]) / 30
        assert both[name] == pytest.approx(joined), name
    assert 0.0 < both["eval/score_mean"] < 1.0
