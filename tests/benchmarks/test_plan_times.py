"""Seconds of a step as `raypo plan` predicts them on this machine's cores, beside those of the run.

A plan is made right before each run and right after it: the machine may drift, so their mean is
compared. All ratios are printed (`-s` shows them).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.bench import ROOT, SHAPES, Bench, random_model

MEASURED = {
    "generate": "generate_s",
    "score": "score_s",
    "update": "update_s",
    "push": "push_weights_s",
}
TOLERANCE = 0.25
PLANNED = """
import json, sys
from pathlib import Path
from raypo.config import load_run_config
from raypo.plan.calibration import rates_here
from raypo.plan.fit import make_plan
from raypo.cluster.hardware import this_machine
from raypo.plan.times import step_time

made = make_plan(load_run_config(Path(sys.argv[1])), this_machine())
step = step_time(made, rates_here(made)(made))
print(json.dumps({"step": step.seconds} | {each.phase: each.seconds for each in step.phases}))
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), repeats=1)


def planned(file: Path) -> dict[str, float]:
    """Seconds by phase, in a process of its own as the command is."""
    done = subprocess.run(
        [sys.executable, "-c", PLANNED, str(file)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("size", list(SHAPES)[-3:])
def test_a_step_takes_what_the_plan_says(bench: Bench, size: str):
    folder = random_model(bench.folder / f"random-{size}", SHAPES[size])
    work = bench.work("float32", "short", model=str(folder), steps=5)
    before = planned(bench.run_file(work))
    taken = bench.raypo(work)
    after = planned(bench.run_file(work))
    rows = {"step": taken["step_s"]} | {name: taken[key] for name, key in MEASURED.items()}
    print(f"\n{size}, seconds predicted before and after, taken, predicted / taken:")
    for name, seconds in rows.items():
        mean = (before[name] + after[name]) / 2
        said = f"{before[name]:.2f}, {after[name]:.2f}, {seconds:.2f}"
        print(f"  {name}: {said}, {mean / seconds:.2f}")
    mean = (before["step"] + after["step"]) / 2
    assert mean == pytest.approx(taken["step_s"], rel=TOLERANCE)
