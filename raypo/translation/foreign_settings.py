"""Settings of another project, read from its resolved config or from one plain command.

No shell is interpreted and no program is read: a file that needs either is refused, with the line
that shows its resolved settings.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from raypo.config.base import ConfigError, parsed

RECIPES = {"GRPOConfig": "ppo", "RLOOConfig": "ppo", "SFTConfig": "sft", "DPOConfig": "dpo"}
RECIPES |= {"RewardConfig": "reward_model"}
"""Recipe for each config class of TRL."""
_TELLING = {
    "GRPOConfig": "scale_rewards",
    "RLOOConfig": "normalize_advantages",
    "DPOConfig": "f_divergence_type",
    "RewardConfig": "center_rewards_coefficient",
    "SFTConfig": "packing",
}
"""A field that only this config class of TRL has."""
_MAINS = {
    "verl.trainer.main_ppo": "verl",
    "recipe.dapo.main_dapo": "verl",
    "openrlhf.cli.train_ppo_ray": "OpenRLHF",
}
"""Project of each program whose command is read."""
_OWN_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configs of verl's main_ppo, which have the same defaults where learning is concerned."""
UNRESOLVED = "${"
"""Mark of a value of verl that could not be resolved."""
_TO_JSON = 'json.dump(args.to_dict(), open("args.json", "w"))'
_TO_COMMAND = (
    "bash -xc 'python() { :; }; python3() { :; }; ray() { :; }; . ./{FILE}' 2>&1 | grep -E "
    "'main_ppo|train_ppo_ray' > command.txt"
)
_QUOTED = re.compile(r"'[^']*'|\"((?:[^\"\\]|\\.)*)\"|\\.", re.DOTALL)
_TAIL = re.compile(
    r"(\s+(\d?>>?|&>)\s*[^\s|;&'\"]+|\s+2>&1|\s+\|\s*tee(\s+-a)?\s+[^\s|;&'\"]+)*(\s*&)?\s*$"
)
"""Redirections, `| tee FILE` and `&` at a command's end, which change none of its arguments."""
_NO_MORE = re.compile(r"""\s+("\$@"|\$@|"\$\{@\}"|\$\*)(?=\s|$)""")
"""The arguments of a script, of which there are none."""
_VARIABLE = "a variable or another command in it"
_OF_A_SHELL = {
    "several commands": r"\n|;|&|\||<|>",
    _VARIABLE: r"[$`]",
    "a comment": r"(^|\s)#",
    "braces that a shell expands": r"\{[^{}]*(,|\.\.)[^{}]*\}",
    "parentheses": r"[()]",
}
"""Parts of a shell script that a plain command lacks, with their pattern outside of quotes."""


class Source(NamedTuple):
    """Settings of another project."""

    project: str
    kind: str
    """Config class of TRL, or empty."""
    arguments: Mapping[str, Any]
    """Values by name; the names of verl are dotted."""
    is_complete: bool
    """True if `arguments` also has the settings that are at their defaults."""

    @property
    def recipe(self) -> str:
        """Recipe of raypo for the settings."""
        return RECIPES.get(self.kind, "ppo")


def read_source(source: str) -> Source:
    """Read a JSON of TRL's config, a resolved config of verl, or one command of verl or OpenRLHF.

    Args:
        source: A file, or the command itself.

    Raises:
        ConfigError: it is none of these. The message says how to get one.
    """
    path = Path(source)
    try:
        is_file = path.is_file()
    except OSError:  # a command that is too long for a file's name
        is_file = False
    if not is_file:
        if not re.search(r"[\s=]", source):
            raise ConfigError(f"{source}: there is no such file. Give a file, or a command.")
        return _of_command(source, "the command", "run.sh")
    if path.suffix in (".py", ".ipynb", ".pkl", ".bin", ".pt"):
        raise ConfigError(
            f"{source}: programs and pickles are not read, because only running them tells their "
            f"values. Add this line where the config of TRL is made, and give the file that it "
            f"writes: {_TO_JSON}"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return of_trl(json.loads(text), source)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{source}: is no JSON: {error}. Write {_TO_JSON}") from None
    if path.suffix in (".yaml", ".yml"):
        return _of_hydra(text, source)
    return _of_command(text, source, path.name)


def of_trl(values: Any, origin: str, kind: str = "") -> Source:
    """Return the fields of a config of TRL as a source.

    Args:
        values: Result of the config's `to_dict`.
        origin: Prefix of error messages.
        kind: Class of the config. If empty, the fields tell it.

    Raises:
        ConfigError: it is not a config that raypo knows.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: must have the fields of a config of TRL. Write {_TO_JSON}")
    kind = kind or next((kind for kind, field in _TELLING.items() if field in values), "")
    if kind not in RECIPES:
        raise ConfigError(
            f"{origin} ({kind or 'fields of no known config'}): raypo reads TRL's "
            f"{', '.join(RECIPES)}. Write one of them: {_TO_JSON}"
        )
    return Source("TRL", kind, dict(values), True)


def _of_hydra(text: str, origin: str) -> Source:
    try:
        tree = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from None
    if not OmegaConf.is_dict(tree) or not {"actor_rollout_ref", "algorithm"} <= set(tree):
        raise ConfigError(
            f"{origin}: is not the config of verl's main_ppo, which has actor_rollout_ref and "
            "algorithm. Other programs of verl are not translated. Write it with `python3 -m "
            "verl.trainer.main_ppo ... --cfg job --resolve > verl.yaml`."
        )
    return Source("verl", "", dict(_leaves(tree)), True)


def _leaves(tree: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield each dotted key with its value. A value that cannot be resolved keeps its `${...}`."""
    for key in tree:
        if str(key) in ("_target_", "hydra"):
            continue
        try:
            value = tree[key]
        except OmegaConfBaseException:
            value = dict.__getitem__(OmegaConf.to_container(tree, resolve=False), key)  # type: ignore[arg-type]
        if OmegaConf.is_dict(value) and len(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            is_node = OmegaConf.is_config(value)
            yield f"{prefix}{key}", OmegaConf.to_container(value) if is_node else value


def _of_command(text: str, origin: str, file: str) -> Source:
    """Read one plain command."""
    words = _words(text, origin, file)
    while words and (words[0] == "+" or re.match(r"\w+=", words[0])):
        del words[0]  # the mark of bash -x, or a variable of the environment
    start = next(
        (
            n + 1
            for n, word in enumerate(words)
            if (n and words[n - 1] in ("-m", "--module"))
            or (re.fullmatch(r"[^=]+\.py", word) and not "".join(words[:n][-1:]).startswith("--"))
        ),
        0,
    )
    main = words[start - 1].removesuffix(".py").replace("/", ".") if start else ""
    arguments = words[start:]
    project = next((p for name, p in _MAINS.items() if f".{main}".endswith(f".{name}")), "")
    if arguments and not main:
        is_flag = arguments[0].startswith("--")
        project = "OpenRLHF" if is_flag else "verl" if "=" in arguments[0] else ""
    if not project:
        raise ConfigError(
            f"{origin} ({main or 'no known program'}): only commands of {', '.join(_MAINS)} are "
            "translated. If another program of verl or OpenRLHF trains as one of these does, give "
            "its arguments alone, in quotes."
        )
    given = _hydra_arguments(arguments, origin) if project == "verl" else _flags(arguments)
    if not given:
        raise ConfigError(f"{origin}: it contains no argument of {project}.")
    return Source(project, "", given, False)


def _words(text: str, origin: str, file: str) -> list[str]:
    """Return the words of a text that is one plain command.

    Comments in lines of their own before and after the command are left out, and `set -x`.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if re.search(r"\\[ \t]+$", line):
            raise ConfigError(
                f"{origin}: line {number} ends in a backslash and a space, where a shell ends the "
                "command. Remove the space."
            )
    idle = re.compile(r"\s*(#.*|set( [-+]\w+)+)?\s*")
    while lines and idle.fullmatch(lines[0]):
        del lines[0]
    while lines and idle.fullmatch(lines[-1]):
        del lines[-1]
    joined = "\n".join(lines).replace("\\\n", "").rstrip("\\ ")
    command = _TAIL.sub("", _NO_MORE.sub("", joined))
    plain = _QUOTED.sub("_", command)
    within = re.sub(r"\\.", "", " ".join(match[1] or "" for match in _QUOTED.finditer(command)))
    for what, pattern in _OF_A_SHELL.items():
        if re.search(pattern, plain) or (what == _VARIABLE and re.search(pattern, within)):
            raise ConfigError(
                f"{origin}: has {what}, and no shell is interpreted. Give the one command that the "
                "shell makes of it, which this line writes without starting it: "
                f"{_TO_COMMAND.replace('{FILE}', file)}. Or, of verl, the config that `--cfg job "
                "--resolve > verl.yaml` at the command's end writes."
            )
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}. Correct the quotes.") from None


def _hydra_arguments(words: Sequence[str], origin: str) -> dict[str, Any]:
    """Return the overrides of a command of verl."""
    overrides: dict[str, Any] = {}
    options = {"--config-path": ("config", "./config"), "--config-name": _OWN_CONFIGS}
    words = [*words]
    while words:
        if not (word := words.pop(0).strip()):
            continue
        name, equals, value = word.partition("=")
        if name in options:
            value = value if equals else words.pop(0) if words else ""
            if value.removesuffix(".yaml") not in options[name]:
                raise ConfigError(
                    f"{origin} ({name} {value}): this YAML is not in the command. Add `--cfg job "
                    "--resolve > verl.yaml` to the command, and give that file."
                )
        elif word.startswith(("-", "~")) or not equals:
            raise ConfigError(
                f"{origin} ({word}): is no override of verl. Remove it, or add `--cfg job "
                "--resolve > verl.yaml` to the command, and give that file."
            )
        else:
            overrides[name.lstrip("+")] = _value(value)
    return overrides


def _flags(words: Iterable[str]) -> dict[str, Any]:
    """Return the flags of a command of OpenRLHF."""
    given: dict[str, list[str]] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            given[last] = [value] if equals else []
        elif last:
            given[last].append(word)
    read = {name: [*map(_flag_value, values)] for name, values in given.items()}
    return {
        name: values if len(values) > 1 else values[0] if values else True
        for name, values in read.items()
    }


def _value(text: str) -> Any:
    try:
        return parsed(text)
    except (YAMLError, OmegaConfBaseException):
        return text


def _flag_value(text: str) -> Any:
    """Return a word of OpenRLHF's command as a number or text: no flag takes a list in one word."""
    value = _value(text)
    return text if isinstance(value, dict | list) else value
