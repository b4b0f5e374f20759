"""Writes the defaults of TRL and verl that `raypo init` compares with.

Run it where these versions are installed: `python -m scripts.foreign_defaults`. OpenRLHF's
arguments are written by hand, because its parser is in no function.
"""

import dataclasses
import enum
import json
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from raypo.config.base import flatten

FILE = Path(__file__).parents[1] / "raypo" / "translation" / "defaults.json"
CONFIGS = ("GRPOConfig", "RLOOConfig", "SFTConfig", "DPOConfig", "RewardConfig")


def defaults_of_trl() -> dict[str, dict[str, Any]]:
    """Return the default of each field of TRL's configs; `common` has those of all of them."""
    trl = import_module("trl")
    tables = {
        name: {each.name: _default(each) for each in dataclasses.fields(getattr(trl, name))}
        for name in CONFIGS
    }
    first, *others = tables.values()
    common = {
        name: value for name, value in first.items() if all(o.get(name, o) == value for o in others)
    }
    own = {
        config: {name: value for name, value in table.items() if name not in common}
        for config, table in tables.items()
    }
    return {"common": common, **own}


def _default(field: Any) -> Any:
    missing = field.default_factory is dataclasses.MISSING
    value = field.default if missing else field.default_factory()
    return value.value if isinstance(value, enum.Enum) else value


def defaults_of_verl() -> dict[str, Any]:
    """Return the default of each key of the config of verl's main_ppo."""
    spec = find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "trainer" / "config"
    tree = OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    tree.actor_rollout_ref.rollout.name = tree.reward.reward_model.rollout.name = "vllm"
    values: Any = OmegaConf.to_container(tree, resolve=True)
    return {key: value for key, value in flatten(values).items() if "_target_" not in key}


if __name__ == "__main__":
    tables = json.loads(FILE.read_text(encoding="utf-8"))
    for package, project, read in (
        ("trl", "TRL", defaults_of_trl),
        ("verl", "verl", defaults_of_verl),
    ):
        try:
            tables[project] = {"version": version(package)} | read()
        except PackageNotFoundError:
            print(f"{package} is not installed, so its table is unchanged.")
    FILE.write_text(json.dumps(tables, indent=0) + "\n", encoding="utf-8")
    print(FILE)
