"""W&B in its offline mode, which starts a process of its own."""

from pathlib import Path

import pytest

from raypo.config import LoggingSection
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import Sinks

OFF = {"tensorboard": False, "prometheus": False}


def test_wandb_offline_keeps_one_run_in_the_run_folder(tmp_path: Path):
    pytest.importorskip("wandb")
    section = LoggingSection.model_validate(OFF | {"wandb": {"mode": "offline"}})
    folder, ids = tmp_path / "a run", []
    for step in (1, 2):
        sinks = Sinks.open(section, files=RunFiles(str(tmp_path), "a run"), config={"seed": 0})
        sinks.write(step, {"rollout/score_mean": 0.5})
        sinks.close()
        ids.append((folder / "wandb-id.txt").read_text())
    assert ids[0] == ids[1]
    files = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2  # `wandb sync` joins them, they have one id
    assert all(path.stat().st_size > 0 for path in files)
