"""Writes the tables of docs/migrating.md from raypo/config/migration.py: `make docs`."""

import re
from pathlib import Path

from raypo.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from raypo.config.fields import known_keys
from raypo.config.key_reference import default_of
from raypo.config.migration import PROJECTS, Counterpart, rows_of
from raypo.translation.foreign_arguments import defaults_of

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"
ROOTS = (PPOConfig, SFTConfig, DPOConfig, RewardModelConfig)


def with_tables(text: str) -> str:
    """Return the page with each table as the module has it.

    It leaves out what concerns memory, speed or files and has no key in raypo.
    """
    for project in PROJECTS:
        head = f"| {project} | default there | raypo | unit, difference |\n|---|---|---|---|\n"
        rows = [row for row in rows_of(project) if row.keys or not row.is_minor]
        table = head + "\n".join(map(_line, rows))
        pattern = rf"(?<=<!-- keys of {project} -->\n\n)\|.*?(?=\n\n)"
        text, count = re.subn(pattern, lambda _: table, text, flags=re.DOTALL)  # noqa: B023
        assert count == 1, f"{PAGE} has {count} tables of {project}"
    return text


def _line(row: Counterpart) -> str:
    newest, *older = (f"`{name}`" for name in row.names)
    names = f"{newest} ({', '.join(older)})" if older else newest
    keys = " or ".join(" and ".join(map(_here, each)) for each in row.keys) or "none"
    default = _default(row)
    return f"| {names} | {default} | {keys} | {row.note} |"


def _default(row: Counterpart) -> str:
    """Return the default in the other project; of TRL that of GRPO, if it has such a field."""
    if row.project == "peft":
        return {"r": "`8`", "lora_alpha": "`8`", "lora_dropout": "`0.0`"}.get(row.names[0], "")
    kinds = ("GRPOConfig", "SFTConfig", "DPOConfig") if row.project == "TRL" else ("",)
    values = [defaults_of(row.project, kind).get(row.names[0]) for kind in kinds]
    value = next((each for each in values if each is not None), None)
    if isinstance(value, bool):
        value = str(value).lower()
    return "" if value in (None, "") else f"`{value}`"


def _here(key: str) -> str:
    """Return a key of raypo with its default."""
    root = next(root for root in ROOTS if key in known_keys(root))
    default = default_of(root, key)
    return f"`{key}`" if default is None else f"`{key}` ({default})"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
