"""The order of what follows a step's update, which every recipe gets from `run_steps`."""

import json
from pathlib import Path
from typing import Any

import pytest
import ray.train

from raypo.collectives import Workers
from raypo.config import SFTConfig
from raypo.metrics.clock import Clock
from raypo.run.callbacks import StepView
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.setup import Runtime
from raypo.run.steps import StepResult, run_steps
from raypo.storage.run_files import RunFiles
from tests.unit.run.test_restored import Console, Counter


def test_a_callback_sees_held_out_metrics_and_its_own_may_stop_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reported: dict[int, Any] = {}  # the state of each checkpoint, by step

    def report(metrics: dict[str, Any], *, checkpoint: Any, **_: Any) -> None:
        state = checkpoint and json.loads(Path(checkpoint.path, "run.json").read_text())
        reported[metrics["step"]] = state

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)
    console = Console()
    console.start = console.step = lambda *_: None  # type: ignore[attr-defined]
    config = SFTConfig.parse(
        {
            "recipe": "sft",
            "name": "run",
            "num_steps": 9,
            "model": {"policy": "p"},
            "data": {"prompts": "d"},
            "eval": {"prompts": "d", "every": 2},
            "checkpoint": {"every": 3},
            "stop": {"metric": "mine/loss", "mode": "min", "at": 0.25},
        }
    )

    def halved(view: StepView) -> dict[str, float]:
        return {"mine/loss": view.metrics["eval/loss"] / 2} if "eval/loss" in view.metrics else {}

    runtime = Runtime("run", str(tmp_path), str(tmp_path), callbacks=(halved,))
    files = RunFiles(str(tmp_path), "run")
    run: Any = Run(config, runtime, Workers(), files, console)  # type: ignore[arg-type]
    records = Records(run)
    learner: Any = Counter(0)
    checkpoints = Checkpoints(run, records, learner, Workers(), {})
    monkeypatch.setattr(records.checkpoints, "wait", lambda: None)  # there is no Ray to finish it

    def train_step(step: int, clock: Clock) -> StepResult:
        clock.lap("time/update_s")
        return StepResult({"train/loss": 1.0}, {"drawn": 8 * step})

    with run.at_end:
        run_steps(run, records, checkpoints, train_step, lambda step: {"eval/loss": 2.0 / step})

    rows = files.metrics()
    assert [row.get("mine/loss") for row in rows] == [None, 0.5, None, 0.25]
    assert [step for step, state in reported.items() if state] == [3, 4]
    assert list(reported) == [2, 3, 4]  # 1 was not evaluated
    last = reported[4]
    assert (last["step"], last["drawn"], last["metrics"]["mine/loss"]) == (4, 32, 0.25)
    names = ["update", "held_out", "callbacks", "checkpoint", "report", "step"]
    assert [name for name in rows[0] if name.startswith("time/")] == [f"time/{n}_s" for n in names]
    assert records.finish() == {"status": "finished", "step": 4}
