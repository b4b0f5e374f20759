import json
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train import CheckpointConfig, RunConfig

from raypo.config.space import Domain
from raypo.metrics.run_files import RunFiles
from raypo.tuning.population import POINTER, next_segment
from raypo.tuning.schedule import inside


def pointer(folder: Path, trial: str) -> Any:
    folder.mkdir()
    content = {"trial": trial, "checkpoint": f"/runs/{trial}/checkpoint_1"}
    (folder / POINTER).write_text(json.dumps(content))
    return tune.Checkpoint.from_directory(str(folder))


def test_another_trials_checkpoint_begins_a_segment_and_ones_own_goes_on(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    files.folder.mkdir()
    assert (next_segment(files, None).number, next_segment(files, None).resume_from) == (0, None)

    copied = next_segment(files, pointer(tmp_path / "a", "p-00000"))
    assert (copied.number, copied.resume_from) == (1, "/runs/p-00000/checkpoint_1")

    for own in (None, pointer(tmp_path / "b", "p-00001")):  # after a pause, or a kill
        assert next_segment(files, own) == copied


def test_a_segment_has_a_folder_of_its_own_and_keeps_what_others_may_copy(tmp_path: Path):
    files = RunFiles(str(tmp_path), "p-00001")
    run = RunConfig(name="p-00001", checkpoint_config=CheckpointConfig(num_to_keep=2))
    made = next_segment(files, None).run_config(run)
    assert (made.name, made.storage_path) == ("segment_0", str(tmp_path / "p-00001"))
    assert made.checkpoint_config is not None
    assert made.checkpoint_config.num_to_keep == 3


@pytest.mark.parametrize(
    ("domain", "value", "nearest"),
    [
        (Domain("uniform", (0.0, 1.0)), 1.2, 1.0),
        (Domain("loguniform", (0.01, 1.0)), 0.008, 0.01),
        (Domain("randint", (1, 5)), 6, 4),
        (Domain("quniform", (0.1, 0.3, 0.05)), 0.24, 0.25),
        (Domain("choice", ("a", "b")), "b", "b"),
    ],
)
def test_perturbed_values_stay_in_the_space(domain: Domain, value: Any, nearest: Any):
    config = {"number": 1, "point": {"x": value}}
    assert inside({"x": domain}, config)["point"]["x"] == pytest.approx(nearest)
