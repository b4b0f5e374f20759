"""Loading and validation of run files as frozen configs, and the error messages for mistakes."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from yaml import YAMLError

from raypo.config import only_if
from raypo.config.fields import FUNCTION, PATH, flatten, marked_keys, nested
from raypo.config.passwords import has_password
from raypo.config.paths import is_uri, make_absolute
from raypo.config.refusals import mistakes

RECORDED_BASE = "base_config"
"""Key of the resolved base config in the config.yaml of a sweep's folder."""

TODO = "TODO"
"""Value of a key that `raypo init` cannot determine. A run file with such a key is refused."""

DIR = "dir"
"""Variable of YAML files: `${dir}` is the folder of the file."""


class ConfigError(ValueError):
    """Invalid input: a key, a value, a file or a combination. The message says what to change."""


ImportPath = Annotated[str, Field(pattern=r"^.+:[^\W\d]\w*$"), FUNCTION]
"""Import path: `file.py:name` or `package.module:name`."""


def is_import_path(value: str) -> bool:
    """Return whether a value is an import path rather than one of raypo's names or a path."""
    return ":" in value


class Config(BaseModel):
    """A frozen section of a run file. Unknown keys are errors.

    A key that has no effect unless another key has certain values declares it on its field
    (`raypo.config.only_if`). A subclass overrides `_problems` to check other rules between keys: it
    yields one message per broken rule, in the form `key (value): rule. remedy.` All messages are
    reported together.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    def _problems(self) -> Iterator[str]:
        yield from ()

    @field_validator("*", mode="wrap")
    @classmethod
    def _numbers_are_not_booleans(cls, value: Any, handler: Any) -> Any:
        # Pydantic converts true to 1. Its strict mode would also refuse lists for tuples, and 1e-5,
        # which YAML reads as text.
        validated = handler(value)
        if _became_number(value, validated):
            raise ValueError("must be a number, not true or false. Write the number.")
        return validated

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def default_value(self, key: str) -> Any:
        """Return the default of a dotted key below this section."""
        name, _, subkey = key.partition(".")
        if subkey:
            return getattr(self, name).default_value(subkey)
        return type(self).model_fields[name].get_default(call_default_factory=True)

    def set_keys(self, *keys: str) -> Iterator[tuple[str, Any]]:
        """Yield the keys below this section that a file sets, with their values.

        A resolved file contains every key, so a key counts as set only if its value is neither null
        nor the default.
        """
        for key in keys:
            value = only_if.value_at(self, key)
            if value is not None and value != self.default_value(key):
                yield key, value


class RunFile(Config):
    """A run file that can be loaded from YAML."""

    storage_path: str = "runs"
    """Folder or URI (s3://...) that runs are written to. A relative path is resolved against the
    driver's working directory."""

    def __init__(self, origin: str = "config", /, **values: Any) -> None:
        """Validate values, like `PPOConfig(name="first", model={"policy": "gpt2"}, ...)`.

        Args:
            origin: Prefix of every error message, usually the path of the file.
            values: Nested values, as in a YAML file.

        Raises:
            ConfigError: see `load`.
        """
        if todo_keys := [
            key for key, value in flatten(values).items() if TODO in _as_sequence(value)
        ]:
            raise ConfigError(
                f"{origin}: {', '.join(todo_keys)} ({TODO}): this file leaves them to you. Set "
                "each to a value; the comment next to each says how to choose it."
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = mistakes(type(self), error.errors())
            raise ConfigError("\n".join(f"{origin}: {line}" for line in lines)) from None

    def _problems(self) -> Iterator[str]:
        yield from only_if.problems(self)
        for key, value in flatten(self.model_dump(mode="json")).items():
            if any(
                isinstance(text, str) and has_password(key, text) for text in _as_sequence(value)
            ):
                yield (
                    f"{key}: has a password or key, which the run's files would show. Remove it "
                    "here, and set the environment variable that its storage or service reads "
                    "(AWS_SECRET_ACCESS_KEY, HF_TOKEN, RAYPO_REWARD_TOKEN, ...). In your own "
                    "code, read it from the environment."
                )

    @property
    def paths(self) -> list[str]:
        """Dotted keys whose values are paths or hub ids, except storage_path."""
        return marked_keys(type(self), PATH)

    @property
    def functions(self) -> list[str]:
        """Dotted keys whose values are import paths of functions and classes."""
        return marked_keys(type(self), FUNCTION)

    @property
    def absolute_storage_path(self) -> str:
        """`storage_path` as an absolute path. A URI is unchanged."""
        path = self.storage_path
        return path if is_uri(path) else str(Path(path).expanduser().absolute())

    @classmethod
    def load(
        cls, path: str | Path, overrides: Mapping[str, Any] | Sequence[str] | None = None
    ) -> Self:
        """Load a config from a YAML file and apply overrides.

        Args:
            path: A YAML file, or the folder of a run or sweep.
            overrides: `{"ppo.kl.coef": 0.02}` or `["ppo.kl.coef=0.02"]`; they take precedence over
                the file.

        Raises:
            ConfigError: the file is missing or not YAML, a key is unknown, or a value or
                combination of values is not allowed. The message lists all mistakes.
        """
        return cls.parse(read_yaml(Path(path), overrides or {}), origin=str(path))

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, origin: str = "config") -> Self:
        """Validate plain nested values and return the config.

        Args:
            values: Nested values, as in a YAML file.
            origin: Prefix of every error message, usually the path of the file.

        Raises:
            ConfigError: see `load`.
        """
        return cls(origin, **{str(key): value for key, value in values.items()})

    def to_yaml(self, include: Collection[str] = ()) -> str:
        """Return the config as a run file, without keys that have their default.

        Args:
            include: Keys that are written even if they have their default.
        """
        values = self.model_dump(mode="json")
        flat = {
            key: functools.reduce(dict.__getitem__, key.split("."), values)
            for key in _leaves(self)
            if only_if.value_at(self, key)
            != ("ppo" if key == "recipe" else self.default_value(key))
            or key in include
        }
        return OmegaConf.to_yaml(OmegaConf.create(nested(escaped(flat))))

    def with_absolute_paths(self, base: str | Path | None = None) -> Self:
        """Return the config for use in another working directory.

        Relative paths that exist below `base` become absolute.

        Args:
            base: Folder that relative paths start from. None means the current folder.
        """
        values, folder = self.model_dump(), Path(base or Path.cwd())
        paths = ("from_checkpoint", *self.paths)
        make_absolute(values, folder, paths=paths, functions=self.functions)
        return type(self).parse(values)

    def differences(self, other: RunFile, *, ignore: Sequence[str] = ()) -> list[str]:
        """Return `key: own value -> other value` for each key that differs.

        Args:
            other: The config to compare with.
            ignore: Keys and sections to ignore.
        """
        own_values, other_values = (
            flatten(self.model_dump(mode="json")),
            flatten(other.model_dump(mode="json")),
        )
        return [
            f"{key}: {own_values.get(key)!r} -> {other_values.get(key)!r}"
            for key in sorted(own_values.keys() | other_values.keys())
            if own_values.get(key) != other_values.get(key)
            and not any(
                key == ignored_key or key.startswith(f"{ignored_key}.") for ignored_key in ignore
            )
        ]


def read_yaml(path: Path, overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return the plain nested values of a YAML file with overrides applied.

    `${dir}` in a value is replaced by the folder of the file, written as in `path`. If `path` is
    the folder of a run or sweep, its config.yaml is read. `storage_path` then becomes the folder
    that contains the run or sweep now.

    Args:
        path: A YAML file, or the folder of a run or sweep.
        overrides: A mapping of dotted keys, or strings like `key=value`.

    Raises:
        ConfigError: the file is missing, not YAML or not a mapping, or an override is malformed.
    """
    folder = path if path.is_dir() else None
    if folder and not (path := folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder}: this is not the folder of a run, because it has no config.yaml. Give a run "
            "config (YAML) or the folder of a run, <storage_path>/<name>."
        )
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file. Give the path of a run config (YAML).")
    try:
        tree = OmegaConf.load(path)
        if not isinstance(tree, DictConfig):
            raise ConfigError(
                f"{path}: a run config must be a mapping of keys, but this is a list or text."
            )
        if folder:
            tree.storage_path = os.path.dirname(os.path.abspath(folder))  # correct for ".." too
            tree.pop(RECORDED_BASE, None)
        for key, value in _parse_overrides(overrides):
            current = OmegaConf.select(tree, key, throw_on_resolution_failure=False)
            is_section = isinstance(value, Mapping) and OmegaConf.is_dict(current)
            OmegaConf.update(tree, key, value, merge=is_section, force_add=True)
        if DIR in tree:
            raise ConfigError(
                f"{path}: {DIR}: this key is reserved, because ${{{DIR}}} is the folder of the "
                "file. Remove the key."
            )
        tree[DIR] = str(path.parent)
        values = OmegaConf.to_container(tree, resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        problem = _repeated_key_problem(path) or f"cannot be read: {error}"
        raise ConfigError(f"{path}: {problem}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != DIR}


def _repeated_key_problem(path: Path) -> str | None:
    """Return the problem of the first key that a YAML file sets twice, or None."""

    def lines_of(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the dotted key and the line of every key."""
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            yield f"{prefix}{key.value}", key.start_mark.line + 1
            yield from lines_of(value, f"{prefix}{key.value}.")

    lines: dict[str, int] = {}
    with suppress(YAMLError):
        for key, line in lines_of(yaml.compose(path.read_text("utf-8"), yaml.SafeLoader)):
            if lines.setdefault(key, line) != line:
                return f"{key}: is given twice, in lines {lines[key]} and {line}. Remove one."
    return None


def escaped(values: Any) -> Any:
    """Escape `${` in all strings of nested values, so that `read_yaml` does not interpolate it."""
    return _replace_in_texts(values, "${", r"\${")


def unescaped(values: Any) -> Any:
    """Undo `escaped`."""
    return _replace_in_texts(values, r"\${", "${")


def _replace_in_texts(values: Any, old: str, new: str) -> Any:
    if isinstance(values, Mapping):
        return {key: _replace_in_texts(value, old, new) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_replace_in_texts(value, old, new) for value in values]
    return values.replace(old, new) if isinstance(values, str) else values


def _leaves(section: Config) -> Iterator[str]:
    """Yield the dotted keys below a section. A section that can be null counts as one value."""
    for name, field in type(section).model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from (f"{name}.{key}" for key in _leaves(getattr(section, name)))
        else:
            yield name


def _as_sequence(value: Any) -> Sequence[Any]:
    """Return a list unchanged, and any other value as a list with one entry."""
    return value if isinstance(value, list | tuple) else [value]


def _became_number(value: Any, validated: Any) -> bool:
    """Return whether validation has converted a boolean, also in a list or mapping, to a number."""
    if isinstance(value, bool):
        return isinstance(validated, int | float) and not isinstance(validated, bool)
    if isinstance(value, Mapping) and isinstance(validated, dict):
        return any(_became_number(value[key], validated.get(key)) for key in value)
    if isinstance(value, list | tuple) and isinstance(validated, tuple):
        return any(map(_became_number, value, validated))
    return False


def _parse_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each override. Values in strings are parsed as YAML."""
    if isinstance(overrides, Mapping):
        yield from overrides.items()
        return
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{text!r} is not an override. Write key=value, like ppo.kl.coef=0.02."
            )
        yield key.strip(), parse_yaml(value)


def parse_yaml(text: str) -> Any:
    """Parse a string as YAML, like the value of an override."""
    container = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    assert isinstance(container, dict)
    return container["value"]
