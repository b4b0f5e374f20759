"""Settings of another project, read from its resolved config or from one plain command.

Shell scripts and Python programs are not interpreted. Such a file is refused, and the error names
the command that writes its resolved settings.
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

from raypo.config.base import ConfigError, parse_yaml

RECIPES = {"GRPOConfig": "ppo", "RLOOConfig": "ppo", "SFTConfig": "sft", "DPOConfig": "dpo"}
RECIPES |= {"RewardConfig": "reward_model"}
"""Recipe for each config class of TRL."""
_DISTINCTIVE_FIELDS = {
    "GRPOConfig": "scale_rewards",
    "RLOOConfig": "normalize_advantages",
    "DPOConfig": "f_divergence_type",
    "RewardConfig": "center_rewards_coefficient",
    "SFTConfig": "packing",
}
"""For each config class of TRL, a field that no other of these classes has."""
_PROGRAMS = {
    "verl.trainer.main_ppo": "verl",
    "recipe.dapo.main_dapo": "verl",
    "openrlhf.cli.train_ppo_ray": "OpenRLHF",
}
"""Project of each training program whose command can be translated."""
_PPO_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer")
"""Configs of verl's main_ppo. Their defaults differ in nothing that decides what is learned."""
UNRESOLVED = "${"
"""Part of a value of verl that refers to another value and could not be resolved."""
_TO_JSON = 'json.dump(args.to_dict(), open("args.json", "w"))'
_TO_COMMAND = (
    "bash -xc 'python() { :; }; python3() { :; }; ray() { :; }; . ./{FILE}' 2>&1 | grep -E "
    "'main_ppo|train_ppo_ray' > command.txt"
)
_QUOTED = re.compile(r"'[^']*'|\"((?:[^\"\\]|\\.)*)\"|\\.", re.DOTALL)
_REDIRECTIONS = re.compile(
    r"(\s+(\d?>>?|&>)\s*[^\s|;&'\"]+|\s+2>&1|\s+\|\s*tee(\s+-a)?\s+[^\s|;&'\"]+)*(\s*&)?\s*$"
)
"""Redirections, `| tee FILE` and `&` at a command's end. They do not change its arguments."""
_SCRIPT_ARGUMENTS = re.compile(r"""\s+("\$@"|\$@|"\$\{@\}"|\$\*)(?=\s|$)""")
"""`$@` and the like: the arguments of a script. They are taken as empty."""
_VARIABLE = "a variable or another command in it"
_SHELL_SYNTAX = {
    "several commands": r"\n|;|&|\||<|>",
    _VARIABLE: r"[$`]",
    "a comment": r"(^|\s)#",
    "braces that a shell expands": r"\{[^{}]*(,|\.\.)[^{}]*\}",
    "parentheses": r"[()]",
}
"""Shell syntax that is refused: its name in the error, and its pattern outside of quotes."""


class Source(NamedTuple):
    """Settings of another project."""

    project: str
    kind: str
    """Config class of TRL. Empty for the other projects."""
    arguments: Mapping[str, Any]
    """Values by name. verl's names are dotted."""
    is_complete: bool
    """True if `arguments` also contains the settings with default values."""

    @property
    def recipe(self) -> str:
        """raypo's recipe for the settings."""
        return RECIPES.get(self.kind, "ppo")


def read_source(path_or_command: str) -> Source:
    """Read a TRL config (JSON), a resolved verl config (YAML), or a command of verl or OpenRLHF.

    Args:
        path_or_command: Path of the file, or the command itself.

    Raises:
        ConfigError: the file or command is none of these.
    """
    path = Path(path_or_command)
    try:
        is_file = path.is_file()
    except OSError:  # "File name too long": it is a command
        is_file = False
    if not is_file:
        if not re.search(r"[\s=]", path_or_command):
            raise ConfigError(
                f"{path_or_command}: there is no such file. Give a file, or a command."
            )
        return _command_source(path_or_command, "the command", "run.sh")
    if path.suffix in (".py", ".ipynb", ".pkl", ".bin", ".pt"):
        raise ConfigError(
            f"{path_or_command}: programs and pickles are not read, because only running them "
            "shows their values. Add this line where the config of TRL is made, and give the file "
            f"that it writes: {_TO_JSON}"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return trl_source(json.loads(text), path_or_command)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{path_or_command}: is not valid JSON: {error}. Write {_TO_JSON}"
            ) from None
    if path.suffix in (".yaml", ".yml"):
        return _hydra_source(text, path_or_command)
    return _command_source(text, path_or_command, path.name)


def trl_source(values: Any, origin: str, kind: str = "") -> Source:
    """Return the settings of a TRL config.

    Args:
        values: Result of the config's `to_dict`.
        origin: Prefix of error messages.
        kind: Class of the config. If empty, it is recognized by its fields.

    Raises:
        ConfigError: the config is of a class that raypo does not translate.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{origin}: must have the fields of a config of TRL. Write {_TO_JSON}")
    kind = kind or next(
        (kind for kind, field in _DISTINCTIVE_FIELDS.items() if field in values), ""
    )
    if kind not in RECIPES:
        raise ConfigError(
            f"{origin} ({kind or 'fields of no known config'}): raypo reads TRL's "
            f"{', '.join(RECIPES)}. Write one of them: {_TO_JSON}"
        )
    return Source("TRL", kind, dict(values), True)


def _hydra_source(text: str, origin: str) -> Source:
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
    """Yield dotted keys and values. A value that cannot be resolved keeps its `${...}`."""
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


def _command_source(text: str, origin: str, file: str) -> Source:
    """Read one plain command."""
    words = _split_command(text, origin, file)
    while words and (words[0] == "+" or re.match(r"\w+=", words[0])):
        del words[0]  # the prefix of `bash -x`, or an environment variable
    first_argument = next(
        (
            index + 1
            for index, word in enumerate(words)
            if (index and words[index - 1] in ("-m", "--module"))
            or (
                re.fullmatch(r"[^=]+\.py", word)
                and not "".join(words[:index][-1:]).startswith("--")
            )
        ),
        0,
    )
    program = (
        words[first_argument - 1].removesuffix(".py").replace("/", ".") if first_argument else ""
    )
    arguments = words[first_argument:]
    project = next(
        (candidate for name, candidate in _PROGRAMS.items() if f".{program}".endswith(f".{name}")),
        "",
    )
    if arguments and not program:
        is_flag = arguments[0].startswith("--")
        project = "OpenRLHF" if is_flag else "verl" if "=" in arguments[0] else ""
    if not project:
        raise ConfigError(
            f"{origin} ({program or 'no known program'}): only commands of {', '.join(_PROGRAMS)} "
            "are translated. If another program of verl or OpenRLHF trains as one of these does, "
            "give its arguments alone, in quotes."
        )
    settings = _hydra_arguments(arguments, origin) if project == "verl" else _flags(arguments)
    if not settings:
        raise ConfigError(f"{origin}: it contains no argument of {project}.")
    return Source(project, "", settings, False)


def _split_command(text: str, origin: str, file: str) -> list[str]:
    """Split a text that is one plain command into words.

    Comment lines and `set` lines before and after the command are dropped.
    """
    lines = text.splitlines()
    for line_number, line in enumerate(lines, 1):
        if re.search(r"\\[ \t]+$", line):
            raise ConfigError(
                f"{origin}: line {line_number} ends in a backslash and a space, where a shell ends "
                "the command. Remove the space."
            )
    blank_line = re.compile(r"\s*(#.*|set( [-+]\w+)+)?\s*")
    while lines and blank_line.fullmatch(lines[0]):
        del lines[0]
    while lines and blank_line.fullmatch(lines[-1]):
        del lines[-1]
    joined = "\n".join(lines).replace("\\\n", "").rstrip("\\ ")
    command = _REDIRECTIONS.sub("", _SCRIPT_ARGUMENTS.sub("", joined))
    unquoted = _QUOTED.sub("_", command)
    double_quoted = re.sub(
        r"\\.", "", " ".join(match[1] or "" for match in _QUOTED.finditer(command))
    )
    for syntax, pattern in _SHELL_SYNTAX.items():
        if re.search(pattern, unquoted) or (
            syntax == _VARIABLE and re.search(pattern, double_quoted)
        ):
            raise ConfigError(
                f"{origin}: has {syntax}, and no shell is interpreted. Give the one command that "
                "the shell makes of it, which this line writes without starting it: "
                f"{_TO_COMMAND.replace('{FILE}', file)}. Or, of verl, the config that `--cfg job "
                "--resolve > verl.yaml` at the command's end writes."
            )
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}. Correct the quotes.") from None


def _hydra_arguments(remaining_words: Sequence[str], origin: str) -> dict[str, Any]:
    """Return the Hydra overrides in a verl command line."""
    overrides: dict[str, Any] = {}
    options = {"--config-path": ("config", "./config"), "--config-name": _PPO_CONFIGS}
    remaining_words = [*remaining_words]
    while remaining_words:
        if not (word := remaining_words.pop(0).strip()):
            continue
        name, equals, value = word.partition("=")
        if name in options:
            value = value if equals else remaining_words.pop(0) if remaining_words else ""
            if value.removesuffix(".yaml") not in options[name]:
                raise ConfigError(
                    f"{origin} ({name} {value}): this YAML is not in the command. Add `--cfg job "
                    "--resolve > verl.yaml` to the command, and give that file."
                )
        elif word.startswith(("-", "~")) or not equals:
            raise ConfigError(
                f"{origin} ({word}): is not an override of verl. Remove it, or add `--cfg job "
                "--resolve > verl.yaml` to the command, and give that file."
            )
        else:
            overrides[name.lstrip("+")] = _value(value)
    return overrides


def _flags(words: Iterable[str]) -> dict[str, Any]:
    """Return the flags of a command of OpenRLHF."""
    words_by_flag: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            words_by_flag[flag] = [value] if equals else []
        elif flag:
            words_by_flag[flag].append(word)
    values_by_flag = {name: [*map(_flag_value, values)] for name, values in words_by_flag.items()}
    return {
        name: values if len(values) > 1 else values[0] if values else True
        for name, values in values_by_flag.items()
    }


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except (YAMLError, OmegaConfBaseException):
        return text


def _flag_value(text: str) -> Any:
    """Parse a word of OpenRLHF's command as a scalar, because no flag takes a list in one word."""
    value = _value(text)
    return text if isinstance(value, dict | list) else value
