"""Another project's arguments with its defaults, and keys that several projects compute alike."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from raypo.config.base import TODO
from raypo.config.migration import Counterpart, rows_of
from raypo.translation.foreign_settings import UNRESOLVED, Source

Settings = dict[str, tuple[Any, str]]
"""Value of each key of raypo and the name of the argument that it comes from, by dotted key."""
DEFAULT = "'s default"
KL_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
"""Estimator of raypo for each of verl and OpenRLHF."""
_EMPTY = (None, False, "", "none", (), [], {})


@cache
def defaults_of(project: str, kind: str = "") -> dict[str, Any]:
    """Return the default of each argument of a project's version, by name.

    Args:
        project: TRL, verl or OpenRLHF.
        kind: Config class of TRL.
    """
    text = files("raypo.translation").joinpath("defaults.json").read_text(encoding="utf-8")
    table = json.loads(text).get(project, {})
    return table["common"] | table[kind] if kind else table


class ForeignArguments:
    """Lookup of another project's arguments, which records what is used and what is left."""

    def __init__(self, source: Source, rows: int | None = None) -> None:
        self.project, self.kind, self.recipe = source.project, source.kind, source.recipe
        self.rows = rows
        self._is_complete, self._all = source.is_complete, source.arguments
        self.defaults = defaults_of(source.project, source.kind)
        table = [*rows_of(source.project), *(rows_of("peft") if source.kind else ())]
        self._rows = {name: row for row in table for name in row.names if "*" not in name}
        self._patterns = [(name, row) for row in table for name in row.names if "*" in name]
        self.arguments = {
            name: value
            for name, value in source.arguments.items()
            if not (source.is_complete and self.is_default(name, value))
        }
        self.is_dotted = any("." in name for name in source.arguments)
        """False for a command of OpenRLHF before 0.11, whose names have no dots."""
        self.used: set[str] = set()
        self.passed: set[str] = set()
        """Arguments that have no effect beside others, or need no key."""
        self.notes: list[str] = []
        """Lines on arguments that change learning and are left to the user."""
        self.minor: list[str] = []
        """Arguments that concern memory, speed or files, with their values."""
        self.idle: list[str] = []
        """Arguments that need no key in raypo, with their values."""

    def is_default(self, name: str, value: Any) -> bool:
        """Return whether a value is the default of an argument."""
        if name not in self.defaults:
            return False
        default = self.defaults[name]
        is_hidden = value == f"<{name.upper()}>"  # a token, which to_dict of TRL leaves out
        return is_hidden or value == default or (value in _EMPTY and default in _EMPTY)

    def row(self, name: str) -> Counterpart | None:
        """Return the row of the tables for an argument."""
        if name in self._rows:
            return self._rows[name]
        return next((row for pattern, row in self._patterns if fnmatchcase(name, pattern)), None)

    def names(self, name: str) -> Sequence[str]:
        """Return a name and the older names of the same argument.

        A row may also have several arguments. Older names are not in the table of defaults, or
        their default is null.
        """
        row = self._rows.get(name)
        if not row or row.is_minor or row.is_automatic:
            return (name,)
        return [name, *(n for n in row.names if n != name and self.defaults.get(n) is None)]

    def has(self, name: str) -> bool:
        """Return whether a value other than the default is given under a name or an older one."""
        return not self.arguments.keys().isdisjoint(self.names(name))

    def lacks(self, name: str) -> bool:
        """Return whether a complete config is of a version that has no such argument."""
        return self._is_complete and self._all.keys().isdisjoint(self.names(name))

    def __call__(self, name: str, usual: Any = None) -> Any:
        """Return the value given under a name or one of its older names.

        If none is given, return the other project's default, or `usual` if there is none. A value
        that could not be resolved is TODO.
        """
        for spelling in self.names(name):
            if spelling in self.arguments:
                self.used.add(spelling)
                value = self.arguments[spelling]
                return TODO if isinstance(value, str) and UNRESOLVED in value else value
        default = self.defaults.get(name)
        return usual if default is None else default

    def value(self, name: str) -> Any:
        """Return the value of an argument without recording that it is used."""
        return self.arguments.get(name, self.defaults.get(name))

    def number(self, name: str) -> float:
        """Return a number, or NaN if it is not known, and with it all that follows from it."""
        value = self(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else math.nan

    def origin(self, name: str) -> str:
        """Return the name under which a value is given, or the name of the default."""
        spellings = (spelling for spelling in self.names(name) if spelling in self.arguments)
        return next(spellings, f"{name}{DEFAULT}")

    def copy(self, done: Settings, names: dict[str, str]) -> None:
        """Set keys of raypo to values of the same meaning, by argument."""
        for name, key in names.items():
            done[key] = self(name), self.origin(name)

    def left(self, done: Settings) -> list[str]:
        """Return the arguments that no key and no note mentions.

        A default that a command repeats needs no mention.
        """
        origins = [origin for _, origin in done.values()]
        told = "\n".join([*origins, *self.notes, *self.minor, *self.idle])
        words = set(re.findall(r"[\w.]+", told))
        return [
            name
            for name, value in self.arguments.items()
            if name not in self.used
            or not (name in words or self.is_default(self.names(name)[0], value))
        ]

    def leave(self, name: str, why: str) -> None:
        """Leave an argument that changes learning to the user."""
        self.notes.append(f"{self.origin(name)} ({self(name)}): {why}")

    def pass_over(self, *names: str) -> None:
        """Mark arguments as needing no key. A name may be a pattern, like `critic.*`."""
        matches = {p: [n for n in self.arguments if fnmatchcase(n, p)] for p in names if "*" in p}
        spellings = (spelling for n in names for spelling in matches.get(n) or self.names(n))
        for name in spellings:
            line = f"{name} ({self.arguments.get(name)})"
            if name in self.arguments and line not in self.idle:
                self.used.add(name)
                self.passed.add(name)
                self.idle.append(line)

    def steps(
        self, done: Settings, epochs: float, name: str, *, most: float = math.inf
    ) -> tuple[Any, str]:
        """Return the number of rollout batches and its origin. It is TODO if rows are not known.

        Args:
            done: Settings so far. The rows of the parquet files in `data.prompts` are counted.
            epochs: Passes over the rows.
            name: The argument that gives `epochs`.
            most: Maximum number of rows that are used.
        """
        from pyarrow import parquet

        prompts = done["rollout.prompts_per_step"][0]
        prompt_files = done.get("data.prompts", ((),))[0]
        rows = self.rows
        if rows is None and prompt_files and prompt_files != TODO:
            with suppress(OSError, ValueError, TypeError):  # no file, or no parquet
                paths = [prompt_files] if isinstance(prompt_files, str) else prompt_files
                rows = sum(parquet.read_metadata(Path(p).expanduser()).num_rows for p in paths)
        if rows is not None and isinstance(prompts, int | float) and epochs == epochs:
            used = int(min(rows, most))
            if steps := int(used // prompts * epochs):
                return steps, f"{used} rows // {prompts} prompts x {epochs:g} of {name}"
        batch = f"{prompts} prompts" if prompts != TODO else "rollout.prompts_per_step"
        at_most = f"min(rows, {most:.0f})" if most < math.inf else "rows"
        return TODO, f"{at_most} // {batch} x {or_todo(epochs, name)} of {name}"

    def set_lr_schedule(self, done: Settings, name: str) -> None:
        """Set the learning-rate schedule. It is TODO if raypo has none like it."""
        kind, origin = str(self(name)), self.origin(name)
        schedule = kind.partition("_with_")[0]
        is_known = schedule in ("constant", "linear", "cosine") and kind != "cosine_with_restarts"
        what = f"{origin} {kind}: constant, linear or cosine"
        done["learner.lr_schedule"] = (schedule, origin) if is_known else (TODO, what)

    def set_warmup(
        self,
        done: Settings,
        name: str,
        ratio: float,
        rounded: Callable[[float], int] = math.ceil,
    ) -> None:
        """Set the warm-up to a fraction of the steps. It is TODO if one of them is not known."""
        steps = done["num_steps"][0]
        done["learner.lr_warmup_steps"] = (
            rounded(ratio * steps) if isinstance(steps, int) and ratio == ratio else TODO,
            f"{or_todo(ratio)} of num_steps, {self.origin(name)}",
        )

    def set_folder(self, done: Settings, name: str) -> None:
        """Set the run's name and the folder of runs from the path of an output folder."""
        folder, origin = Path(str(self(name))), self.origin(name)
        done |= {"name": (folder.name, origin), "storage_path": (str(folder.parent), origin)}

    def set_lora(self, done: Settings, *, rank: str, alpha: str, modules: str) -> None:
        """Set the adapter's keys from the arguments with these names."""
        if self(rank):  # 0 means no LoRA
            self.copy(done, {rank: "model.lora.rank", alpha: "model.lora.alpha"})
            value = self(modules, "all-linear")
            value = "all-linear" if value == ["all-linear"] else value
            words = value if isinstance(value, list) or value == "all-linear" else [value]
            done["model.lora.target_modules"] = words, self.origin(modules)
        else:
            self.pass_over(rank, alpha, modules)

    def set_kl_loss(self, done: Settings, name: str, *, placement: str) -> None:
        """Set the estimator of a KL in the loss. It is TODO if raypo has none like it."""
        kind, origin = str(self(name)), self.origin(name)
        done["ppo.kl.placement"] = "loss", placement
        estimator = KL_ESTIMATORS.get(kind.removesuffix("+"))
        if kind.endswith("+") and estimator:  # verl: the gradient of k2; the value is only logged
            estimator = "k3_st" if estimator == "k3" else "k2"
        done["ppo.kl.estimator"] = estimator, origin
        if estimator in (None, "k1"):
            why = "has the gradient 0 in expectation" if estimator else "is not in raypo"
            done["ppo.kl.estimator"] = (
                TODO,
                f"{origin} {kind} {why}: k2, k3 or k3_st, or k1 with ppo.kl.placement: reward",
            )

    def set_workers(self, done: Settings, *, gpus: str, nodes: str) -> None:
        """Set the number of learner workers to GPUs per node x nodes, if GPUs are given."""
        if self.has(gpus):
            count = self.number(gpus) * self.number(nodes)
            origin = f"{self.origin(gpus)} x {self.origin(nodes)}"
            done["learner.num_workers"] = or_todo(count), origin


def or_todo(value: float, otherwise: Any = TODO) -> Any:
    """Return a number that was computed, or TODO if it is NaN."""
    return otherwise if value != value else value
