"""`raypo train --fresh` with a reward function that raises."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

from tests.integration.task import raypo, read_metrics
from tests.integration.test_command import TIMEOUT_S


def test_fresh_starts_over_and_a_reward_function_that_raises_ends_the_run_with_its_error(
    first: SimpleNamespace, task: Path
):
    """In the folder of a run that is finished, and was of another config.

    What a checkpoint had written by then goes too: on a full disk nothing else would find room.
    """
    folder = task.parent / "runs" / "raises"
    shutil.copytree(first.folder, folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("name: tiny", "name: raises"))
    (task.parent / "bad_reward.py").write_text(
        "import pathlib\n\n"
        "def broken(rollouts):\n"
        f"    pathlib.Path({str(folder)!r}, '.partial-checkpoint-1').mkdir(exist_ok=True)\n"
        "    raise KeyError('no such label')\n"
    )
    spec = f"{task.parent}/bad_reward.py:broken"
    command = raypo("train", task, "name=raises", f"reward.function={spec}", "--fresh")
    out, error = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 1, out
    assert "no such label" in error
    assert "bad_reward.py" in error
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    assert read_metrics(folder) == []
    assert not (folder / "policy").exists()
    assert not list(folder.glob(".partial-checkpoint-*"))
