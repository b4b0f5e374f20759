"""How a run file becomes a frozen, validated config, and how its mistakes are told."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError
from yaml import YAMLError


class ConfigError(ValueError):
    """The input is wrong: a key, a value, a file or a combination. The text says what to change."""


class Config(BaseModel):
    """A frozen section of a run file; a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RunFile(Config):
    """A whole run file, loadable from YAML."""

    @classmethod
    def load(
        cls, path: str | Path, overrides: Mapping[str, Any] | Sequence[str] | None = None
    ) -> Self:
        """The config of a YAML file with overrides on top.

        Args:
            path: A YAML file.
            overrides: `{"ppo.kl.coef": 0.02}` or `["ppo.kl.coef=0.02"]`; they win over the file.

        Raises:
            ConfigError: the file is missing or no YAML, a key is unknown, a value or a
                combination of values is not allowed. All mistakes are listed, not the first.
        """
        return cls.parse(read_yaml(Path(path), overrides or {}), origin=str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, origin: str = "config") -> Self:
        """The config of plain nested values; `origin` stands in front of every mistake."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [_explain(cls, detail) for detail in error.errors()]
            raise ConfigError("\n".join(f"{origin}: {line}" for line in lines)) from None

    def differences(self, other: Self, *, ignore: Sequence[str] = ()) -> list[str]:
        """`key: mine -> theirs` for each key that differs, sections in `ignore` left out."""
        mine, theirs = flatten(self.model_dump(mode="json")), flatten(other.model_dump(mode="json"))
        return [
            f"{key}: {mine.get(key)!r} -> {theirs.get(key)!r}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key) and key.split(".")[0] not in ignore
        ]


def read_yaml(path: Path, overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Plain nested values of a YAML file, overridden by `key=value` texts or a flat mapping."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file. Give the path of a run config (YAML).")
    try:
        tree = OmegaConf.load(path)
        if not OmegaConf.is_dict(tree):
            raise ConfigError(f"{path}: a run config is a mapping of keys, this is a list or text.")
        if isinstance(overrides, Mapping):
            for key, value in overrides.items():
                OmegaConf.update(tree, key, value, merge=True, force_add=True)
        else:
            _refuse_malformed(overrides)
            tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(tree, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; empty mappings stay as values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key below a section, sections included."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        for section in _sections_of(field.annotation):
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]


def _refuse_malformed(overrides: Sequence[str]) -> None:
    for text in overrides:
        if "=" not in text or not text.split("=", 1)[0].strip():
            raise ConfigError(f"{text!r} is no override. Write key=value, like ppo.kl.coef=0.02.")


def _explain(model: type[BaseModel], detail: Any) -> str:
    """One pydantic error as `key (value): rule. remedy`."""
    key = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        known = known_keys(model)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6) or [
            k for k in known if k.split(".")[-1] == key.split(".")[-1]
        ]
        hint = f"Did you mean {near[0]}?" if near else "Remove it."
        return f"{key}: there is no such key. {hint}"
    if detail["type"] == "missing":
        return f"{key}: this key is required. Set it in the file or as {key}=VALUE."
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error" and (not key or isinstance(detail["input"], Mapping)):
        return message  # a rule between keys names them itself
    rule = message[0].lower() + message[1:]
    return f"{key} ({detail['input']!r}): {rule}. Set {key} to an allowed value."
