"""Error messages for the values and keys of a run file that pydantic refuses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from raypo.config.fields import flatten, known_keys, section_of
from raypo.config.migration import remedy_for_foreign


def mistakes(model: type[BaseModel], details: Iterable[Any]) -> list[str]:
    """Return an error message for each mistake that Pydantic reports.

    Errors of several members of a union count as one mistake.
    """
    details_by_key: dict[str, list[Any]] = {}
    for detail in details:
        if detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]:
            continue  # pydantic counts only valid entries; the others have errors
        details_by_key.setdefault(_key_of(model, detail), []).append(detail)
    lines = []
    for key, errors in details_by_key.items():
        sentences = [d for d in errors if d["type"] in _SENTENCES or not key]
        lines += [line for detail in sentences for line in _explain(model, key, detail).split("\n")]
        rules = [_rule(detail) for detail in errors if detail not in sentences]
        if rules:
            remedy = _remedy(key, errors) if len(rules) == 1 else f"Set {key} to one of them."
            lines.append(f"{key} ({errors[0]['input']!r}): {', or '.join(rules)}. {remedy}")
    return lines


_SENTENCES = ("extra_forbidden", "missing", "value_error")


def _key_of(model: type[BaseModel], detail: Any) -> str:
    """Return the dotted key of an error, without pydantic's names of union members."""
    parts: list[str] = []
    section: type[BaseModel] | None = model
    is_unknown = detail["type"] == "extra_forbidden"
    for depth, part in enumerate(detail["loc"], start=1):
        fields = section.model_fields if section else {}
        if part in fields:
            section = section_of(fields[part].annotation)
        elif not isinstance(part, int) and not (is_unknown and depth == len(detail["loc"])):
            continue
        parts.append(str(part))
    return ".".join(parts)


def _explain(model: type[BaseModel], key: str, detail: Any) -> str:
    """Return the message of an unknown key, a missing key or a broken rule."""
    if detail["type"] == "extra_forbidden":
        keys, value = known_keys(model), detail["input"]
        subkeys = flatten({key: value}) if isinstance(value, Mapping) else {}
        # If the key is a whole section of another project, like verl's actor_rollout_ref, explain
        # each key in it.
        unknown = (
            subkeys
            if any(remedy_for_foreign(unknown_key, keys) for unknown_key in subkeys)
            else [key]
        )
        return "\n".join(
            f"{unknown_key}: there is no such key. {remedy_for_unknown(unknown_key, keys)}"
            for unknown_key in unknown
        )
    if detail["type"] == "missing":
        return f"{key}: this key is required. Set it in the file or as {key}=VALUE."
    message = detail["msg"].removeprefix("Value error, ")
    if not key or isinstance(detail["input"], Mapping):
        return message  # the message of a rule between keys names the keys
    return f"{key} ({detail['input']!r}): {message}"


def _rule(detail: Any) -> str:
    if detail["type"] in ("model_type", "model_attributes_type"):
        return "must be a section with keys and values"
    message = detail["msg"].replace("Input should", "must").replace("should", "must")
    return message[0].lower() + message[1:]


def _remedy(key: str, errors: Sequence[Any]) -> str:
    (detail,) = errors
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"Write its keys below {key}."
    for name, text in _BOUNDS.items():
        if name in detail.get("ctx", {}) and isinstance(detail["input"], int | float):
            return f"Set {key} {text} {detail['ctx'][name]}."
    return f"Set {key} to an allowed value."


_BOUNDS = {"ge": "to at least", "gt": "above", "le": "to at most", "lt": "below"}


_REMOVED_KEYS = {
    "resources": ("max_concurrent", "Remove it, and set max_concurrent if trials have to wait."),
    "share_batches": ("max_concurrent", "Remove it: trials on the same engines take turns."),
}
"""Removed keys that resemble no other key: a current key of the same config, and the remedy."""


def remedy_for_unknown(key: str, known: Sequence[str]) -> str:
    """Return `Did you mean ppo.kl.coef?` if a similar key is known, else `Remove it.`

    The candidates are tried in this order:
    1. a key below the same section with the same ending (ppo.kl.coef for ppo.kl_coef);
    2. the counterpart of a key of TRL, verl, OpenRLHF or peft, whose remedy is then returned;
    3. a key of the same section that is spelled similarly, that ends in the unknown name
       (learner.policy_lr for learner.lr), or that contains all words of the unknown name;
    4. a key of any section with the same or a similar ending.

    Only the last parts of keys are compared by spelling, because whole keys of one section are all
    similar.
    """
    current_key, remedy = _REMOVED_KEYS.get(key.partition(".")[0], ("", ""))
    if current_key in known:
        return remedy
    section, _, name = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    name_parts = set(name.split("_"))
    subkeys = [k for k in known if k.startswith(f"{section}.") and name in _endings(k)]
    if not subkeys and (foreign := remedy_for_foreign(key, known)):
        return foreign
    similar = (
        subkeys
        or [
            siblings[match] for match in difflib.get_close_matches(name, siblings, n=1, cutoff=0.75)
        ]
        or [k for sibling, k in siblings.items() if sibling.endswith(f"_{name}")]
        or [k for sibling, k in siblings.items() if name_parts <= set(sibling.split("_"))]
        or [k for k in known if name in _endings(k)]
        or [k for k in known if difflib.get_close_matches(name, [k.rpartition(".")[2]], 1, 0.85)]
    )
    return f"Did you mean {' or '.join(similar[:2])}?" if similar else "Remove it."


def _endings(key: str) -> list[str]:
    """Return all endings of a key, like coef, kl_coef and ppo_kl_coef for `ppo.kl.coef`."""
    parts = key.split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]
