"""Extraction of the arguments of a TRL script, or of a verl or OpenRLHF command.

The script or command is read, not executed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Any

from yaml import YAMLError

from raypo.config.base import ConfigError, parsed

TRL_RECIPES = {"GRPO": "ppo", "SFT": "sft", "DPO": "dpo", "Reward": "reward_model"}
"""Recipe for each prefix of the names of TRL's trainers and configs."""


def read_script(source: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the arguments of a script's TRL trainer and its configs.

    Raises:
        ConfigError: the script is not Python, or creates no trainer with a counterpart in raypo.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError as error:
        raise ConfigError(f"--from-trl: line {error.lineno} is not Python: {error.msg}.") from None
    assigned = [each for each in nodes if isinstance(each, ast.Assign)]
    constants = {ast.unparse(each.targets[0]): each.value for each in assigned}
    recipe, given, has_lora = "", {}, False
    for node in nodes:
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        match = re.fullmatch(r"(\w+?)(Trainer|Config)", name)
        if not isinstance(node, ast.Call) or not match or match[1] not in {*TRL_RECIPES, "Lora"}:
            continue
        recipe = TRL_RECIPES.get(match[1], recipe)
        named: dict[str, ast.expr] = {each.arg: each.value for each in node.keywords if each.arg}
        if match[2] == "Trainer":
            named |= dict(zip(("model", "reward_funcs"), node.args, strict=False))
        for key in ("args", "processing_class"):  # the loop visits the calls in them
            named.pop(key, None)
        given |= {key: _literal(value, constants) for key, value in named.items()}
        has_lora = has_lora or match[1] == "Lora"
    if not recipe:
        which = ", ".join(f"{each}Trainer" for each in TRL_RECIPES)
        raise ConfigError(
            f"--from-trl: the script creates no {which} of TRL. Give a script that does."
        )
    return recipe, given | ({"peft_config": "LoraConfig"} if has_lora else {})


def read_command(text: str, project: str) -> dict[str, Any]:
    """Return the arguments of a shell command: `key=value` of verl, `--key value` of OpenRLHF.

    Raises:
        ConfigError: the command has an unclosed quotation, or is not OpenRLHF's PPO.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        text = "\n".join(lines).replace("\\\n", " ")
        # Keep an arithmetic expression in one word.
        text = re.sub(r"\$\(\(.*?\)\)", lambda each: "".join(each[0].split()), text)
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(
            f"--from-{project.lower()}: cannot be read as a shell command ({error}). Give the "
            f"command alone, without comments behind it."
        ) from None
    variables = {"HOME": str(Path.home())}
    for place, word in enumerate(words):
        word = Template(word).safe_substitute(variables)
        words[place] = word = re.sub(
            r"\$\{(\w+):?-([^{}]*)\}", lambda use: variables.get(use[1], use[2]), word
        )
        name, is_assigned, value = word.partition("=")
        if is_assigned and re.fullmatch(r"\w+", name):
            variables[name] = value
    if project == "verl":
        pairs = [re.fullmatch(r"[+~]*(\w+(?:\.\w+)+)=(.*)", word, re.DOTALL) for word in words]
        return {pair[1]: _parsed(pair[2]) for pair in pairs if pair}
    # `ray job submit` and Python have flags of their own before the module.
    modules = [place for place, word in enumerate(words) if re.search(r"\bopenrlhf\.cli\.", word)]
    words = words[modules[-1] if modules else 0 :]
    if modules and ".train_ppo" not in words[0]:
        raise ConfigError(
            f"--from-openrlhf ({words[0]}): only commands of train_ppo_ray are translated. Write "
            f"the run file by hand; docs/migrating.md has the keys."
        )
    given: dict[str, Any] = {}
    end = re.compile(r"--|[|;&<>]|\d>")  # a flag, a redirection or another command
    for start, word in enumerate(words):
        if word.startswith("--") and word != "--":
            name, _, value = word.removeprefix("--").partition("=")
            after = takewhile(lambda each: not end.match(each), words[start + 1 :])
            values = [value] if value else list(after)
            if len(values) > 1 and not any("$" in each for each in values):
                given[name] = list(map(_parsed, values))
            else:
                given[name] = _parsed(" ".join(values)) if values else True
    return given


def _parsed(text: str) -> Any:
    """Parse a value. If the shell has to compute it (`$((2 * N))`), return it as an `ast.Name`."""
    if "$" in text:
        return ast.Name(text)
    try:
        return parsed(text)
    except YAMLError:
        return text


def _literal(value: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    """Return the value of a literal, or of a variable that holds one.

    For a call of `load_dataset` return its arguments, for any other expression its syntax tree.
    """
    value = constants.get(ast.unparse(value), value)
    with suppress(ValueError, IndexError):
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("load_dataset"):
            named = {each.arg: each.value for each in value.keywords if each.arg == "split"}
            named |= dict(zip(("path", "config"), value.args, strict=False))
            return {name: ast.literal_eval(each) for name, each in named.items()}
        return ast.literal_eval(value)
    return value
