"""Sweeps whose base is no PPO: supervised fine-tuning, and a population of DPO runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles
from raypo.tuning.outcome import Outcome
from tests.integration.pipeline import dpo_values, write_examples
from tests.integration.task import read_metrics

pytestmark = pytest.mark.usefixtures("local_ray")


def sweep(folder: Path, name: str, base: dict[str, Any], **keys: Any) -> tuple[Outcome, Path]:
    from raypo.tuning.sweep_file import run_sweep

    write_examples(folder)
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    told = {"name": name, "base": f"{folder}/base.yaml", "storage_path": f"{folder}/runs"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(told | {"searcher": "grid"} | keys))
    config = SweepConfig.load(path)
    files = RunFiles(config.storage_path, config.name)
    return run_sweep(config, config.base_config(), files), files.folder


def test_a_population_of_preferences_goes_on_from_the_best_whatever_it_has_drawn(tmp_path: Path):
    """The worse one draws fewer pairs a step, so the copy has pairs that it never asked about."""
    outcome, folder = sweep(
        tmp_path,
        "population",
        dpo_values(tmp_path) | {"num_steps": 4},
        space={"learner.batch_size": {"grid": [4, 16]}},
        overrides={"checkpoint.every": 2, "eval.every": 2, "eval.function": None},
        metric="eval/loss",
        mode="min",
        scheduler={"kind": "pbt", "perturb_every": 2, "quantile": 0.5},
    )
    assert [record.status for record in outcome.records] == ["finished", "finished"]
    for record in outcome.records:
        rows = read_metrics(folder / "trials" / record.name)
        assert [row["step"] for row in rows] == [1, 2, 3, 4]
