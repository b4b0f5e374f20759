"""Whole runs on data sets of Ray Data, and one that is larger than the memory of its readers."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray.data
from ray.train import ScalingConfig

from raypo import SFTTrainer
from raypo.config import ConfigError
from tests.integration.pipeline import sft_values, write_examples
from tests.integration.task import read_metrics

LARGE = """
import resource, sys
import ray.data
from raypo import SFTTrainer
from raypo.data import item_store
from raypo.data.examples import load_examples
from raypo.models.loading import load_tokenizer, stop_token_ids

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

item_store.MEMORY_BYTES = 1 << 20
folder, rows = sys.argv[1], int(sys.argv[2])
tokenizer = load_tokenizer(f"{folder}/model")

def text(row):
    return {"prompt": f"{row['id']}=", "response": "7" * 200}

values = {"name": f"large-{rows}", "storage_path": folder, "model.policy": f"{folder}/model",
          "num_steps": 1}
made = SFTTrainer(values, datasets={"train": ray.data.range(rows).map(text)}).config
loaded = load_examples(made.data, tokenizer, stop_token_ids(f"{folder}/model", tokenizer))
assert len(loaded.items) == rows
print("PEAK", peak())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray_data")
    write_examples(path)
    return path


def peak_mb(folder: Path, rows: int) -> float:
    """Return the largest resident memory of a process that writes and loads a data set, in MiB."""
    script = folder / "large.py"
    script.write_text(LARGE)
    command = [sys.executable, str(script), str(folder), str(rows)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(shown.rpartition("PEAK")[2])


def test_a_data_set_larger_than_the_memory_that_it_takes(folder: Path):
    rows = 150_000
    in_memory = rows * (200 * 4 + 300) / 2**20  # token ids, and the objects that hold them
    grown = peak_mb(folder, rows) - peak_mb(folder, 3000)
    assert in_memory > 150
    assert grown < 0.5 * in_memory


@pytest.mark.usefixtures("local_ray")
def test_a_run_is_the_same_on_other_workers_and_after_a_stop(folder: Path):
    rows = ray.data.from_items(
        [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(8) for b in range(8)],
        override_num_blocks=6,
    )

    def fit(name: str, workers: int = 1, given: Any = rows, **changes: Any) -> list[dict[str, Any]]:
        values = sft_values(folder) | {"name": name, **changes}
        del values["data"]["prompts"], values["data"]["label_key"], values["rollout"]
        values["learner"] |= {"lr_schedule": "constant"}
        values["eval"] = {"every": 3}
        SFTTrainer(
            values,
            datasets={"train": given, "eval": given.limit(9)},
            scaling_config=ScalingConfig(num_workers=workers),
        ).fit()
        return read_metrics(folder / "runs" / name)

    whole = fit("whole", num_steps=6)
    two = fit("two", workers=2, num_steps=6)
    fit("stopped", num_steps=3)
    with pytest.raises(ConfigError, match=r"the data set has changed"):
        fit("stopped", num_steps=6, given=rows.limit(63))
    stopped = fit("stopped", num_steps=6)
    for one, other, again in zip(whole, two, stopped, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
        assert again["train/loss"] == one["train/loss"]
    assert stopped[-1]["eval/loss"] == whole[-1]["eval/loss"]
