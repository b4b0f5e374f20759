"""Writes docs/configuration.md from the config classes: `make docs`.

Keys, allowed values, defaults and meanings are read from the classes and from the docstrings below
their fields, so the page says what the program does. A unit test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from raypo.config import (
    DistillationConfig,
    DPOConfig,
    IterativeDPOConfig,
    PPOConfig,
    RecipeConfig,
    RejectionSamplingConfig,
    RewardModelConfig,
    SFTConfig,
)
from raypo.config.fields import section_of
from raypo.config.key_reference import (
    FIRST_KEYS,
    Key,
    docstrings,
    explain,
    is_value,
    keys_of,
    preset_text,
    section_text,
)
from raypo.config.presets import PRESETS
from raypo.config.sweep_config import SweepConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
INTRODUCTION = """# Configuration

<!-- Written by `make docs` from the classes in raypo/config: edit their docstrings instead. -->

A run is one YAML file. `raypo train run.yaml key=value ...` overrides any key by its dotted name;
overrides win over the file, and what Python passes to a trainer wins over both. A key that does not
exist is an error, and so is a value outside its bounds, or a key that would have no effect. Each
error names the key, its value, the rule and what to do. `config.yaml` in the run folder is the
resolved file, with every default written out.

Relative paths start from the folder in which the command is run. `${dir}` is the folder of the
file: `prompts: ${dir}/prompts.jsonl` lies beside it, wherever that is. *Required* keys have no
default.

`raypo config KEY` prints the rows of a key or section in the terminal, and `raypo config` the first
table.

- [The keys that matter first](#the-keys-that-matter-first), [Presets](#presets)
- [PPO runs](#ppo-runs), [SFT runs](#sft-runs), [Reward-model runs](#reward-model-runs),
  [DPO runs](#dpo-runs), [Rejection-sampling runs](#rejection-sampling-runs),
  [Iterative-DPO runs](#iterative-dpo-runs), [Distillation runs](#distillation-runs): the key
  `recipe` says which; without it a file is a PPO run
- [Sweep files](#sweep-files)
"""
FILES: dict[str, type[BaseModel]] = {
    "PPO runs": PPOConfig,
    "SFT runs": SFTConfig,
    "Reward-model runs": RewardModelConfig,
    "DPO runs": DPOConfig,
    "Rejection-sampling runs": RejectionSamplingConfig,
    "Iterative-DPO runs": IterativeDPOConfig,
    "Distillation runs": DistillationConfig,
    "Sweep files": SweepConfig,
}
"""Heading -> the class of that file."""
PRESETS_NOTE = """Keys that a file sets override those of its preset. Keys that the preset does not
name have their defaults."""
COMMON = tuple(RecipeConfig.model_fields)


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        f"## The keys that matter first\n\n{_first_keys()}",
        f"## Presets\n\n{PRESETS_NOTE}\n\n{_presets()}",
    ]
    known: dict[str, type[BaseModel]] = {}
    for title, root in FILES.items():
        parts.append(f"## {title}\n\n{_cell(section_text(root))}\n")
        same = []
        for path, section, meaning in _sections(root):
            if path and known.get(path) is section:
                if not path.startswith(tuple(f"{above}." for above in same)):
                    same.append(path)
                continue
            known.setdefault(path, section)
            if path:
                parts.append(f"### `{path}`\n\n{_cell(meaning)}\n")
            parts.append(_table(root, path, section))
        if same:
            named = ", ".join(f"`{path}`" for path in same)
            parts.append(f"As in a PPO run, with all below them: {named}.\n")
    return "\n".join(parts)


def _sections(
    section: type[BaseModel], path: str = ""
) -> Iterator[tuple[str, type[BaseModel], str]]:
    """Each section below one, itself first: dotted path, class, what it is for."""
    if not path:
        yield path, section, ""
    told = docstrings(section)
    # What a recipe brings along comes first, what all recipes have last.
    fields = sorted(section.model_fields.items(), key=lambda item: item[0] in COMMON)
    for name, field in fields:
        below = section_of(field.annotation)
        if below is not None:
            full = f"{path}.{name}" if path else name
            own = told.get(name, "") if not is_value(field) else ""
            yield full, below, " ".join(filter(None, (section_text(below), own)))
            yield from _sections(below, full)


HEAD = "| key | values | default | meaning |\n|---|---|---|---|\n"


def _table(root: type[BaseModel], path: str, section: type[BaseModel]) -> str:
    """Return the keys of a section that have values of their own."""
    lines = "".join(map(_line, keys_of(root, section, path)))
    return HEAD + lines if lines else ""


def _line(key: Key) -> str:
    default = "*required*" if key.default is None else f"`{key.default}`"
    return f"| `{key.name}` | {key.values} | {default} | {_cell(key.meaning)} |\n"


def _first_keys() -> str:
    return HEAD + "".join(_line(explain(key, PPOConfig)[0]) for key in FIRST_KEYS)


def _presets() -> str:
    lines = (f"| `{name}` | `{preset_text(name)}` |\n" for name in PRESETS)
    return "| `ppo.preset` | sets below `ppo` |\n|---|---|\n" + "".join(lines)


def _cell(text: str) -> str:
    """Escape a text for a table; `<name>` outside of code would be taken as HTML."""
    return re.sub(r"<(?=[a-z])", "&lt;", text.replace("|", "\\|"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
