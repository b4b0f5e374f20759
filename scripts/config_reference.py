"""Writes docs/configuration.md from the config classes: `make docs`.

Keys, allowed values, defaults and meanings are read from the classes and from the docstrings below
their fields, so the page says what the program does. A unit test compares the two.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

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
from raypo.config.sweep_config import Constraint, SweepConfig

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
COMMON = tuple(RecipeConfig.model_fields)


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    known: dict[str, type[BaseModel]] = {}
    for title, root in FILES.items():
        parts.append(f"## {title}\n\n{_text(root)}\n")
        same = []
        for path, section, meaning in _sections(root):
            if path and known.get(path) is section:
                if not path.startswith(tuple(f"{above}." for above in same)):
                    same.append(path)
                continue
            known.setdefault(path, section)
            if path:
                parts.append(f"### `{path}`\n\n{meaning}\n")
            parts.append(_table(path, section))
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
    told = _docstrings(section)
    # What a recipe brings along comes first, what all recipes have last.
    fields = sorted(section.model_fields.items(), key=lambda item: item[0] in COMMON)
    for name, field in fields:
        below = _section_of(field.annotation)
        if below is not None:
            full = f"{path}.{name}" if path else name
            own = told.get(name, "") if not _is_value(field) else ""
            yield full, below, " ".join(filter(None, (_text(below), own)))
            yield from _sections(below, full)


def _table(path: str, section: type[BaseModel]) -> str:
    """The keys of a section that have values of their own."""
    told = _docstrings(section)
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        if _is_value(field):
            key = f"{path}.{name}" if path else name
            default = "*required*" if field.is_required() else f"`{_usual(field)}`"
            values = _values(field.annotation, field.metadata)
            lines.append(f"| `{key}` | {values} | {default} | {told.get(name, '')} |")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def default_of(root: type[BaseModel], key: str) -> str | None:
    """A key's default as in a run file; None if it is required, or null, or a section."""
    *sections, name = key.split(".")
    section: Any = root
    for each in sections:
        section = _section_of(section.model_fields[each].annotation)
    field = section.model_fields[name]
    is_shown = _is_value(field) and not field.is_required() and field.default is not None
    return _usual(field) if is_shown else None


def _usual(field: FieldInfo) -> str:
    return _yaml(field.get_default(call_default_factory=True))


def _is_value(field: FieldInfo) -> bool:
    """Whether a key can be set to something else than a section's keys: null, a list, a number."""
    is_section = inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel)
    return not is_section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a type holds, directly, in a list or beside null."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_of(each) for each in get_args(annotation))
    return next((each for each in found if each is not None), None)


@functools.cache
def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """Field -> the docstring below it, of the class and of those that it inherits from."""
    told: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not issubclass(each, BaseModel) or each is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in itertools.pairwise(tree.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    told[name] = _one_line(text)
    return told


def _text(section: type[BaseModel]) -> str:
    """What a class says of itself."""
    return _one_line((section.__doc__ or "").split("\nAttributes:")[0])


def _one_line(text: str) -> str:
    """Text for a cell of a table; `<name>` outside of code would be taken as HTML."""
    return re.sub(r"<(?=[a-z])", "&lt;", " ".join(text.split()).replace("|", "\\|"))


def _values(annotation: Any, metadata: list[Any]) -> str:
    """What a key may be set to, in words."""
    if get_origin(annotation) is Annotated:
        inner, *rest = get_args(annotation)
        return _values(inner, [*metadata, *rest])
    metadata = [each for m in metadata for each in (getattr(m, "metadata", None) or [m])]
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [_values(each, metadata) for each in get_args(annotation)]
        return ", or ".join(dict.fromkeys(kinds))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{_yaml(value)}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        item = _values(get_args(annotation)[0], [])
        is_either = any(isinstance(each, BeforeValidator) for each in metadata)
        return f"{item}, or a list of such" if is_either else f"list: {item}"
    if annotation is type(None):
        return "`null`"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "its keys, below"
    if annotation in (int, float):
        kind = "integer" if annotation is int else "number"
        signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
        bounds = [
            f"{sign} {getattr(each, name):g}"
            for each in metadata
            for name, sign in signs.items()
            if getattr(each, name, None) is not None
        ]
        return f"{kind} {', '.join(bounds)}".strip()
    words = {str: "text", bool: "`true`, `false`", dict: "mapping", Constraint: "text"}
    return words.get(get_origin(annotation) or annotation, str(annotation))


def _yaml(value: Any) -> str:
    """A value as it is written in a run file."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.1e}".replace("e-0", "e-") if 0 < value < 1e-3 else f"{value:g}"
    return json.dumps(value)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
