"""A run that is killed anywhere in a save goes on from its last whole checkpoint."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.unit.run.killed_saves import POINTS, STEP


def test_it_goes_on_from_the_checkpoint_before_the_save(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.run.killed_run", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends == [-signal.SIGKILL] * len(POINTS) + [0], done.stderr
    assert (tmp_path / "run" / "killed.txt").read_text().splitlines() == POINTS
    begun = [int(line) for line in (tmp_path / "attempts.txt").read_text().splitlines()]
    # The one before the save is whole, but Ray Train may not have listed it yet.
    assert begun[0] == 0
    assert {*begun[1:]} <= {STEP - 2, STEP - 1}
    for name in ("policy", "best/policy"):
        weights = load_file(tmp_path / "run" / name / "model.safetensors")
        assert {float(each.max()) for each in weights.values()} == {4.0}
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text())["step"] == 4
    left_over = [path.name for path in (tmp_path / "run").glob(".partial-*")]
    assert left_over == []
