"""Arguments of another project, and keys that are computed in the same way for several projects."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from raypo.config.base import parsed
from raypo.config.migration import Counterpart

Settings = dict[str, tuple[Any, str]]
"""Value of each key of raypo and the name of the argument that it comes from, by dotted key."""
DEFAULT = "'s default"
TODO = "TODO"
WORDS = {
    **{"group_norm": "grpo", "reinforce_plus_plus": "reinforce"},
    **{"reinforce_plus_plus_baseline": "reinforce_baseline"},
    **{"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"},
    **{"seq-mean-token-sum-norm": "constant", "vanilla": "ppo", "geo_mean": "gmpo"},
    **{"low_var_kl": "k3", "mse": "k2", "kl": "k1"},
}
"""Values in raypo, by the value with the same meaning in verl or OpenRLHF."""


class Unread(NamedTuple):
    """Value of an argument, or of a group of arguments, that could not be read."""

    why: str
    """Reason, and what to do about it. It becomes a note."""


class Arguments:
    """Lookup of another project's arguments, with its defaults. It records which names are used.

    Expressions are not evaluated: a number that is given by an expression is NaN, and so is every
    number computed from it.
    """

    def __init__(self, given: Mapping[str, Any], rows: Mapping[str, Counterpart]) -> None:
        self.given, self.rows, self.used = given, rows, set[str]()
        self.idle: list[str] = []
        """Arguments that need no key in raypo, with their values, for a note."""

    def __call__(self, name: str, usual: Any = None) -> Any:
        """Return the value given under a name or one of its older names.

        If none is given, return the other project's default, or `usual` if there is no default.
        """
        row = self.rows.get(name)
        default = parsed(row.default) if row and row.default else usual
        for each in row.names if row else (name,):
            if each in self.given:
                is_number = type(default) in (int, float)
                value = self.given[each]
                if isinstance(value, ast.AST) or (is_number and isinstance(value, str)):
                    return math.nan if is_number else default
                self.used.add(each)
                return self.given[each]
        return default

    def origin(self, name: str) -> str:
        """Return the name under which a value is given. For a default, `DEFAULT` is appended to the
        name.
        """
        row = self.rows[name]
        given = [
            each
            for each in row.names
            if each in self.given and not isinstance(self.given[each], ast.AST)
        ]
        return given[0] if given else f"{row.names[0]}{DEFAULT}"


def steps_of(epochs: float, name: str, done: Settings, most: Any = None) -> tuple[Any, str]:
    """Return the number of steps and its origin. The number is TODO if it cannot be computed.

    Args:
        epochs: Passes over the rows.
        name: The argument that gives `epochs`.
        done: Settings so far. The rows of the parquet files in `data.prompts` are counted.
        most: Maximum number of rows that are used. If the rows cannot be counted, it is assumed to
            be their number.
    """
    from pyarrow import parquet

    prompts: Any = done.get("rollout.prompts_per_step", ("rollout.prompts_per_step",))[0]
    files = done.get("data.prompts", ("",))[0]
    rows, counted = most, "rows of max_samples"
    with suppress(OSError, ValueError, TypeError):  # no file, or no parquet
        paths = [Path(each).expanduser() for each in ([files] if isinstance(files, str) else files)]
        rows = min(sum(parquet.read_metadata(path).num_rows for path in paths), most or math.inf)
        counted = "rows"
    with suppress(ValueError, TypeError):  # a number is not known
        if steps := int(rows // prompts * epochs):
            return steps, f"{rows} {counted} // {prompts} prompts x {epochs} of {name}"
    times = name if math.isnan(epochs) else f"{epochs} of {name}"
    is_known = prompts == prompts and prompts != TODO  # False if NaN
    each = f"{prompts} prompts" if is_known else "rollout.prompts_per_step"
    return TODO, f"rows / {each} x {times}"


def set_lora(get: Arguments, done: Settings, *, rank: str, alpha: str) -> None:
    """Set the adapter's rank and alpha in `done` from the arguments named `rank` and `alpha`."""
    if get(rank):  # 0 means no LoRA
        done["model.lora.rank"] = get(rank), get.origin(rank)
        done["model.lora.alpha"] = get(alpha), get.origin(alpha)


def set_kl_loss(done: Settings, *, kind: str, origin: str) -> None:
    """Set the estimator of a KL in the loss in `done`. It is TODO if raypo has none like it."""
    known = WORDS.get(kind, kind)
    if known.endswith("+"):  # verl: the gradient of k2; the value is only logged
        known = "k3_st" if known in ("k3+", "low_var_kl+") else "k2"
    done["ppo.kl.estimator"] = known, origin
    if known not in ("k2", "k3", "k3_st"):
        why = "has the gradient 0 in expectation" if known == "k1" else "is not in raypo"
        done["ppo.kl.estimator"] = (
            TODO,
            f"{origin} {kind} {why}: k2, k3 or k3_st, or k1 with ppo.kl.placement: reward",
        )


def set_workers(get: Arguments, done: Settings, *, gpus: str, nodes: str) -> None:
    """Set the number of learner workers in `done` to GPUs per node x nodes, if GPUs are given."""
    if any(name in get.given for name in get.rows[gpus].names):
        done["learner.num_workers"] = get(gpus) * get(nodes, 1), f"{gpus} x {nodes}"
