"""Writes what `raypo plan` says of examples/recipes/*.yaml into their heads: `make docs`.

The models' shapes are written here, so that no hub is needed.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from raypo.cluster.hardware import GB, parse_cluster
from raypo.config import load_run_config
from raypo.plan.fit import make_plan
from raypo.plan.times import Rates, step_time

FOLDER = Path(__file__).parents[1] / "examples" / "recipes"


def _shape(kind: str, *sizes: int, tied: bool = False) -> dict[str, Any]:
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    keys = [*names.split(), "num_key_value_heads"]
    return {"model_type": kind, "tie_word_embeddings": tied, **dict(zip(keys, sizes, strict=True))}


SHAPES = {
    "Qwen/Qwen2.5-0.5B-Instruct": _shape("qwen2", 151_936, 896, 4864, 24, 14, 2, tied=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _shape("qwen2", 151_936, 1536, 8960, 28, 12, 2, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _shape("qwen2", 152_064, 3584, 18_944, 28, 28, 4),
    "meta-llama/Llama-3.1-8B-Instruct": _shape("llama", 128_256, 4096, 14_336, 32, 32, 8),
    "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2": _shape("llama", 128_256, 4096, 14_336, 32, 32, 8),
}
"""Hub id -> its config.json, as far as a plan reads it."""


def recipes() -> list[Path]:
    """Return the run files."""
    return sorted(FOLDER.glob("*.yaml"))


def with_plan(text: str) -> str:
    """Return a recipe's text with the figures of its plan in the line `# Plan (CLUSTER): ...`."""
    found = re.search(r"^# Plan \((.+?)\): .*$", text, flags=re.MULTILINE)
    assert found, "a recipe has a line # Plan (CLUSTER): ..."
    return text.replace(found[0], f"# Plan ({found[1]}): {_plan(text, found[1])}")


def _plan(text: str, cluster: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, shape) in enumerate(SHAPES.items()):
            path = Path(folder) / str(number)
            path.mkdir()
            (path / "config.json").write_text(json.dumps(shape))
            text = text.replace(name, str(path))
        file = Path(folder) / "run.yaml"
        file.write_text(text.replace("num_epochs: 1\n", "num_steps: 100\n"))
        plan = make_plan(load_run_config(file), parse_cluster(cluster))
        assert plan.fits, plan.problems
        rates = Rates.of(plan)
        fullest = max(load.needed for load in plan.loads if "GPU" in load.name) / GB
        is_timed = plan.config.recipe == "ppo" and rates is not None
        seconds = f"{step_time(plan, rates).seconds:.0f} s a step, " if is_timed else ""
    return f"{seconds}fullest GPU {fullest:.0f} GB of 80"


if __name__ == "__main__":
    for recipe in recipes():
        recipe.write_text(with_plan(recipe.read_text()))
        print(recipe)
