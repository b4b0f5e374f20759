"""Another project's arguments and defaults, and the keys that all translations compute alike."""

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
"""Value of each key of raypo and its origin (argument or formula), by dotted key."""
DEFAULT = "'s default"
"""Suffix of the origin of a value that is the other project's default."""
KL_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "kl": "k1", "k1": "k1"}
"""raypo's KL estimator for each estimator name of verl and OpenRLHF."""
_EMPTY = (None, False, "", "none", (), [], {})


@cache
def defaults_of(project: str, kind: str = "") -> dict[str, Any]:
    """Return the defaults of the translated version of a project, by argument.

    Args:
        project: TRL, verl or OpenRLHF.
        kind: Config class of TRL. Empty for the other projects.
    """
    text = files("raypo.translation").joinpath("defaults.json").read_text(encoding="utf-8")
    table = json.loads(text).get(project, {})
    return table["common"] | table[kind] if kind else table


class ForeignArguments:
    """Another project's arguments, with a record of the arguments that the translation reads."""

    def __init__(self, source: Source, rows: int | None = None) -> None:
        self.project, self.kind, self.recipe = source.project, source.kind, source.recipe
        self.rows = rows
        self._is_complete, self._all_arguments = source.is_complete, source.arguments
        self.defaults = defaults_of(source.project, source.kind)
        table = [*rows_of(source.project), *(rows_of("peft") if source.kind else ())]
        self._counterparts = {name: row for row in table for name in row.names if "*" not in name}
        self._patterns = [(name, row) for row in table for name in row.names if "*" in name]
        self.arguments = {
            name: value
            for name, value in source.arguments.items()
            if not (source.is_complete and self.is_default(name, value))
        }
        self.is_dotted = any("." in name for name in source.arguments)
        """False for a command of OpenRLHF before 0.11, whose names have no dots."""
        self.used: set[str] = set()
        self.ignored: set[str] = set()
        """Arguments that have no effect next to others, or need no key."""
        self.notes: list[str] = []
        """Lines about arguments that change what is learned and that the user must translate."""
        self.minor: list[str] = []
        """Arguments that concern memory, speed or files, with their values."""
        self.keyless: list[str] = []
        """Arguments that need no key in raypo, with their values."""

    def is_default(self, name: str, value: Any) -> bool:
        """Return whether a value is the default of an argument."""
        if name not in self.defaults:
            return False
        default = self.defaults[name]
        # TRL's to_dict replaces tokens by such a text.
        is_hidden = value == f"<{name.upper()}>"
        return is_hidden or value == default or (value in _EMPTY and default in _EMPTY)

    def counterpart(self, name: str) -> Counterpart | None:
        """Return the row of the migration tables for an argument."""
        if name in self._counterparts:
            return self._counterparts[name]
        return next(
            (counterpart for pattern, counterpart in self._patterns if fnmatchcase(name, pattern)),
            None,
        )

    def names(self, name: str) -> Sequence[str]:
        """Return a name and the older names of the same argument.

        A row of the tables may also name several arguments that exist at the same time. Older
        names have no default, or the default null.
        """
        counterpart = self._counterparts.get(name)
        if not counterpart or counterpart.is_minor or counterpart.is_automatic:
            return (name,)
        return [name, *(n for n in counterpart.names if n != name and self.defaults.get(n) is None)]

    def has(self, name: str) -> bool:
        """Return whether an argument is set to a value other than its default, under any name."""
        return not self.arguments.keys().isdisjoint(self.names(name))

    def lacks(self, name: str) -> bool:
        """Return whether a complete config comes from a version without this argument."""
        return self._is_complete and self._all_arguments.keys().isdisjoint(self.names(name))

    def get(self, name: str, fallback: Any = None) -> Any:
        """Return an argument's value, which may be set under an older name, and record the use.

        If it is not set, return the other project's default, or `fallback` if there is none. A
        value that could not be resolved is TODO.
        """
        for spelling in self.names(name):
            if spelling in self.arguments:
                self.used.add(spelling)
                value = self.arguments[spelling]
                return TODO if isinstance(value, str) and UNRESOLVED in value else value
        default = self.defaults.get(name)
        return fallback if default is None else default

    def value(self, name: str) -> Any:
        """Return an argument's value or default without recording the use."""
        return self.arguments.get(name, self.defaults.get(name))

    def number(self, name: str) -> float:
        """Return a number. An unknown one is NaN, and so is all that is computed from it."""
        value = self.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value if is_number else math.nan

    def origin(self, name: str) -> str:
        """Return the name under which a value is set, or a text that names the default."""
        spellings = (spelling for spelling in self.names(name) if spelling in self.arguments)
        return next(spellings, f"{name}{DEFAULT}")

    def copy(self, settings: Settings, keys: dict[str, str]) -> None:
        """Copy arguments to keys of raypo that have the same meaning (`keys`: argument to key)."""
        for name, key in keys.items():
            settings[key] = self.get(name), self.origin(name)

    def unmentioned(self, settings: Settings) -> list[str]:
        """Return the arguments that neither a key nor a note mentions.

        An argument that repeats its default is not returned.
        """
        origins = [origin for _, origin in settings.values()]
        mentions = "\n".join([*origins, *self.notes, *self.minor, *self.keyless])
        mentioned_names = set(re.findall(r"[\w.]+", mentions))
        return [
            name
            for name, value in self.arguments.items()
            if name not in self.used
            or not (name in mentioned_names or self.is_default(self.names(name)[0], value))
        ]

    def leave_to_user(self, name: str, reason: str) -> None:
        """Add a note about an argument that changes what is learned and that the user must set."""
        self.notes.append(f"{self.origin(name)} ({self.get(name)}): {reason}")

    def ignore(self, *names: str) -> None:
        """Record that arguments need no key. A name may be a pattern, like `critic.*`."""
        matches = {p: [n for n in self.arguments if fnmatchcase(n, p)] for p in names if "*" in p}
        spellings = (spelling for n in names for spelling in matches.get(n) or self.names(n))
        for name in spellings:
            line = f"{name} ({self.arguments.get(name)})"
            if name in self.arguments and line not in self.keyless:
                self.used.add(name)
                self.ignored.add(name)
                self.keyless.append(line)

    def steps(
        self, settings: Settings, epochs: float, name: str, *, max_rows: float = math.inf
    ) -> tuple[Any, str]:
        """Return the number of rollout batches and its origin. The number is TODO if it is unknown.

        Args:
            settings: Settings so far. If the number of rows is unknown, the rows of the parquet
                files in `data.prompts` are counted.
            epochs: Passes over the rows.
            name: The argument that gives `epochs`.
            max_rows: Maximum number of rows that a run uses.
        """
        from pyarrow import parquet

        prompts_per_step = settings["rollout.prompts_per_step"][0]
        prompt_files = settings.get("data.prompts", ((),))[0]
        rows = self.rows
        if rows is None and prompt_files and prompt_files != TODO:
            with suppress(OSError, ValueError, TypeError):  # no file, or no parquet
                paths = [prompt_files] if isinstance(prompt_files, str) else prompt_files
                rows = sum(parquet.read_metadata(Path(p).expanduser()).num_rows for p in paths)
        if rows is not None and isinstance(prompts_per_step, int | float) and epochs == epochs:
            used_rows = int(min(rows, max_rows))
            if steps := int(used_rows // prompts_per_step * epochs):
                return (
                    steps,
                    f"{used_rows} rows // {prompts_per_step} prompts x {epochs:g} of {name}",
                )
        batch_text = (
            f"{prompts_per_step} prompts"
            if prompts_per_step != TODO
            else "rollout.prompts_per_step"
        )
        rows_text = f"min(rows, {max_rows:.0f})" if max_rows < math.inf else "rows"
        return TODO, f"{rows_text} // {batch_text} x {or_todo(epochs, name)} of {name}"

    def set_lr_schedule(self, settings: Settings, name: str) -> None:
        """Set the learning-rate schedule. It is TODO if raypo has no counterpart."""
        kind, origin = str(self.get(name)), self.origin(name)
        schedule = kind.partition("_with_")[0]
        is_known = schedule in ("constant", "linear", "cosine") and kind != "cosine_with_restarts"
        origin_hint = f"{origin} {kind}: constant, linear or cosine"
        settings["learner.lr_schedule"] = (schedule, origin) if is_known else (TODO, origin_hint)

    def set_warmup(
        self,
        settings: Settings,
        name: str,
        ratio: float,
        rounding: Callable[[float], int] = math.ceil,
    ) -> None:
        """Set the warm-up to a fraction of the steps. It is TODO if either number is unknown."""
        steps = settings["num_steps"][0]
        settings["learner.lr_warmup_steps"] = (
            rounding(ratio * steps) if isinstance(steps, int) and ratio == ratio else TODO,
            f"{or_todo(ratio)} of num_steps, {self.origin(name)}",
        )

    def set_folder(self, settings: Settings, name: str) -> None:
        """Set the run's name and the folder of runs from the path of an output folder."""
        folder, origin = Path(str(self.get(name))), self.origin(name)
        settings |= {"name": (folder.name, origin), "storage_path": (str(folder.parent), origin)}

    def set_lora(self, settings: Settings, *, rank: str, alpha: str, modules: str) -> None:
        """Set the adapter's keys from the arguments with these names."""
        if self.get(rank):  # 0 means no LoRA
            self.copy(settings, {rank: "model.lora.rank", alpha: "model.lora.alpha"})
            value = self.get(modules, "all-linear")
            value = "all-linear" if value == ["all-linear"] else value
            target_modules = value if isinstance(value, list) or value == "all-linear" else [value]
            settings["model.lora.target_modules"] = target_modules, self.origin(modules)
        else:
            self.ignore(rank, alpha, modules)

    def set_kl_loss(self, settings: Settings, name: str, *, placement: str) -> None:
        """Set the estimator of a KL in the loss. It is TODO if raypo has no counterpart."""
        kind, origin = str(self.get(name)), self.origin(name)
        settings["ppo.kl.placement"] = "loss", placement
        estimator = KL_ESTIMATORS.get(kind.removesuffix("+"))
        if kind.endswith("+") and estimator:  # verl: the gradient of k2; the value is only logged
            estimator = "k3_st" if estimator == "k3" else "k2"
        settings["ppo.kl.estimator"] = estimator, origin
        if estimator in (None, "k1"):
            reason = "has the gradient 0 in expectation" if estimator else "is not in raypo"
            settings["ppo.kl.estimator"] = (
                TODO,
                f"{origin} {kind} {reason}: k2, k3 or k3_st, or k1 with ppo.kl.placement: reward",
            )

    def set_images(self, settings: Settings, name: str, *, frozen: str) -> None:
        """Set the column of the images if it is given, and tell if the vision tower is trained.

        Args:
            settings: Settings so far.
            name: The argument with the column. Its default does not tell that prompts have images.
            frozen: The argument that freezes the vision tower.
        """
        given = {
            each: self.arguments[spelling]
            for each in (name, frozen)
            for spelling in self.names(each)
            if spelling in self.arguments
        }
        if name in given:
            self.copy(settings, {name: "data.image_key"})
        if given and not given.get(frozen):
            self.leave_to_user(
                frozen,
                "model.freeze. raypo does not train the vision tower ([vision], the default); [] "
                "trains it, but only by recipes without an engine.",
            )

    def set_workers(self, settings: Settings, *, gpus: str, nodes: str) -> None:
        """Set the number of learner workers to GPUs per node x nodes, if GPUs are given."""
        if self.has(gpus):
            count = self.number(gpus) * self.number(nodes)
            origin = f"{self.origin(gpus)} x {self.origin(nodes)}"
            settings["learner.num_workers"] = or_todo(count), origin


def or_todo(value: float, fallback: Any = TODO) -> Any:
    """Return a computed number, or `fallback` if it is NaN."""
    return fallback if value != value else value
