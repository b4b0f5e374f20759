"""Extraction of the arguments of a TRL script, or of a verl or OpenRLHF command.

The script or command is read, not executed.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Any

from yaml import YAMLError

from raypo.config.base import ConfigError, parsed
from raypo.config.sources import DATA_FILES
from raypo.translation.foreign_arguments import Unread

TRL_RECIPES = {"GRPO": "ppo", "SFT": "sft", "DPO": "dpo", "Reward": "reward_model"}
"""Recipe for each prefix of the names of TRL's trainers and configs."""
_SHARED = ("args", "data_collator", "train_dataset", "eval_dataset", "processing_class")
_POSITIONS = {
    "GRPO": ("model", "reward_funcs", *(each for each in _SHARED if each != "data_collator")),
    "DPO": ("model", "ref_model", *_SHARED),
    "SFT": ("model", *_SHARED),
    "Reward": ("model", *_SHARED),
}
"""Names of the first positional arguments of each trainer."""
_IN_PLACE = ("update", "setdefault", "pop", "append", "extend", "insert", "remove", "clear")
"""Methods that change a list or a dict."""
_SPLIT = "\0"
"""Mark of a word that a shell splits after it has replaced its variable."""


def read_script(source: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe and the arguments of a script's TRL trainer and its configs.

    Raises:
        ConfigError: the script is not Python, or does not create one kind of trainer with a
            counterpart in raypo.
    """
    try:
        nodes = [
            each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.expr | ast.stmt)
        ]
    except SyntaxError as error:
        raise ConfigError(f"--from-trl: line {error.lineno} is not Python: {error.msg}.") from None
    nodes.sort(key=lambda each: (each.lineno, each.col_offset))
    constants = _constants(nodes)
    calls = [
        (match[1], match[2], node)
        for node in nodes
        if isinstance(node, ast.Call)
        and (match := re.fullmatch(r"(?:.*\.)?(\w+?)(Trainer|Config)", ast.unparse(node.func)))
    ]
    kind = _kind([(prefix, suffix) for prefix, suffix, _ in calls])
    given: dict[str, Any] = {}
    configs = [call for prefix, suffix, call in calls if (prefix, suffix) == (kind, "Config")]
    adapters = [call for prefix, suffix, call in calls if (prefix, suffix) == ("Lora", "Config")]
    for call in [call for prefix, suffix, call in calls if (prefix, suffix) == (kind, "Trainer")]:
        named = _arguments(call, _POSITIONS[kind], constants)
        config = named.pop("args", None)
        named.pop("processing_class", None)
        if isinstance(config, ast.AST) and config not in configs:
            why = f"the script does not create this {kind}Config. Set the keys of its arguments."
            given[f"args={ast.unparse(config)}"] = Unread(why)
        given |= named
    for call in configs:
        given |= _arguments(call, ("output_dir",), constants)
    for call in adapters:
        given |= _arguments(call, (), constants)
    given |= _set_later(nodes, [*configs, *adapters], constants)
    return TRL_RECIPES[kind], given | ({"peft_config": "LoraConfig"} if adapters else {})


def _kind(calls: Sequence[tuple[str, str]]) -> str:
    """Return the prefix of the script's trainer. If it has none, return the prefix of its config.

    Args:
        calls: Prefix and suffix of the names of the trainers and configs that the script creates.
    """
    known = [each for each in calls if each[0] in TRL_RECIPES]
    trainers = dict.fromkeys(prefix for prefix, suffix in known if suffix == "Trainer")
    kinds = list(trainers or dict.fromkeys(prefix for prefix, _ in known))
    if not kinds:
        which = ", ".join(f"{each}Trainer" for each in TRL_RECIPES)
        raise ConfigError(
            f"--from-trl: the script creates no {which} of TRL. Give a script that does."
        )
    if len(kinds) > 1:
        which = " and ".join(f"{each}Trainer" for each in kinds)
        raise ConfigError(
            f"--from-trl: the script creates {which}, and a run file has one recipe. Give a script "
            "with one of them at a time."
        )
    return kinds[0]


def _constants(nodes: Sequence[ast.AST]) -> dict[str, ast.expr]:
    """Return the value of each variable that is assigned and not changed in place."""
    assigned = {
        ast.unparse(target): node.value
        for node in nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    for node in nodes:
        if (isinstance(node, ast.Attribute) and node.attr in _IN_PLACE) or (
            isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        ):
            assigned.pop(ast.unparse(node.value), None)
        elif isinstance(node, ast.AugAssign):
            assigned.pop(ast.unparse(node.target), None)
    return assigned


def _arguments(
    call: ast.Call, names: Sequence[str], constants: Mapping[str, ast.expr]
) -> dict[str, Any]:
    """Return the values of a call's arguments, and a reason for each that cannot be read.

    Args:
        call: The call.
        names: Names of its positional arguments.
        constants: Values of variables.
    """
    first = list(takewhile(lambda each: not isinstance(each, ast.Starred), call.args))
    named = dict(zip(names, first, strict=False))
    left = [ast.unparse(each) for each in call.args[len(named) :]]
    for each in call.keywords:
        value = constants.get(ast.unparse(each.value), each.value)
        if each.arg:
            named[each.arg] = value
        elif isinstance(value, ast.Dict) and all(isinstance(k, ast.Constant) for k in value.keys):
            keys = [str(ast.literal_eval(key)) for key in value.keys if key]
            named |= dict(zip(keys, value.values, strict=True))
        elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
            named |= {each.arg or "**": each.value for each in value.keywords}
        else:
            left.append(f"**{ast.unparse(each.value)}")
    given: dict[str, Any] = {}
    for key, value in named.items():
        given |= _values(key, constants.get(ast.unparse(value), value))
    function, why = ast.unparse(call.func), "cannot be read. Set the keys of these arguments."
    return given | {f"{function}({each})": Unread(why) for each in left}


def _set_later(
    nodes: Sequence[ast.AST], calls: Sequence[ast.Call], constants: Mapping[str, ast.expr]
) -> dict[str, Any]:
    """Return the arguments that a script sets in its configs afterwards (`args.beta = 0.1`)."""
    configs = {name for name, value in constants.items() if value in calls}
    given: dict[str, Any] = {}
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in configs:
                if isinstance(node, ast.Assign):
                    value = constants.get(ast.unparse(node.value), node.value)
                    given |= _values(target.attr, value)
                else:
                    given[target.attr] = node
    return given


def read_command(text: str, project: str) -> dict[str, Any]:
    """Return the arguments of a shell command: `key=value` of verl, `--key value` of OpenRLHF.

    Raises:
        ConfigError: the command has an unclosed quotation, or is not OpenRLHF's PPO.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    try:
        words = _expanded("\n".join(lines).replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(
            f"--from-{project.lower()}: cannot be read as a shell command ({error}). Give the "
            f"command alone, without comments behind it."
        ) from None
    if project == "verl":
        pairs = [re.fullmatch(r"[+~]*(\w+(?:\.\w+)+)=(.*)", word, re.DOTALL) for word in words]
        modules = [n for n, word in enumerate(words) if re.search(r"\bmain_\w+(\.py)?$", word)]
        after = words[modules[-1] + 1 if modules else 0 :]
        own = takewhile(re.compile(r"[+~]*\w+(\.\w+)*=|[-$]").match, after)
        return _unset(own) | _hydra(words) | {pair[1]: _parsed(pair[2]) for pair in pairs if pair}
    # `ray job submit` and Python have flags of their own before the module.
    modules = [place for place, word in enumerate(words) if re.search(r"\bopenrlhf\.cli\.", word)]
    words = words[modules[-1] if modules else 0 :]
    if modules and ".train_ppo" not in words[0]:
        raise ConfigError(
            f"--from-openrlhf ({words[0]}): only commands of train_ppo_ray are translated. Write "
            f"the run file by hand; docs/migrating.md has the keys."
        )

    end = re.compile(r"--|[|;&<>]|\d>")  # a flag, a redirection or another command
    given = _unset(takewhile(lambda each: not end.match(each), words[1:]))
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


def _expanded(text: str) -> list[str]:
    """Return the words of a command, with the values of its variables and arrays.

    An unquoted variable that is a whole word, and an array, are split into words again.
    """
    # Keep an arithmetic expression in one word.
    text = re.sub(r"\$\(\(.*?\)\)", lambda each: "".join(each[0].split()), text)
    # Rewrite arrays as variables: `A=(x y)` as `A=' x y'`, and `"${A[@]}"` as `${A}`. Their
    # values may have parentheses, as in `$((2*N))`.
    text = re.sub(
        r"""^(\s*\w+\+?=)\(((?:"[^"]*"|'[^']*'|[^()"']|\((?:[^()]|\([^()]*\))*\))*)\)""",
        lambda each: each[1] + shlex.quote(f" {each[2]}"),
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r'"(\$\{\w+)\[@\]\}"|(\$\{\w+)\[[@*]\]\}', r"\1\2}", text)
    text = re.sub(r"(?<!\S)(?=\$(\w+|\{\w+(:?-[^{}\s]*)?\})(?!\S))", _SPLIT, text)
    variables = {"HOME": str(Path.home())}
    words: list[str] = []
    for each in shlex.split(text):
        word = Template(each.replace(_SPLIT, "")).safe_substitute(variables)
        word = re.sub(r"\$\{(\w+):?-([^{}]*)\}", lambda use: variables.get(use[1], use[2]), word)
        if assignment := re.fullmatch(r"(\w+)(\+?)=(.*)", word, re.DOTALL):
            name, is_added, value = assignment.groups()
            variables[name] = (variables.get(name, "") if is_added else "") + value
        try:
            words += shlex.split(word) if each.startswith(_SPLIT) else [word]
        except ValueError:  # an apostrophe, which a shell does not read as a quote here
            words += word.split()
    return words


def _unset(words: Iterable[str]) -> dict[str, Any]:
    """Return a reason for each word that is a variable whose value is not known."""
    why = "its value is not in the command. Write its arguments into the command, and repeat init."
    names = [word for word in words if re.fullmatch(r"\$\{?[A-Za-z_]\w*\}?", word)]
    return {name: Unread(why) for name in names}


def _hydra(words: Sequence[str]) -> dict[str, Any]:
    """Return a reason for each flag of Hydra that names a YAML file, which is not read."""
    flags = re.compile(r"--config-(name|path|dir)(=|$)|-c[npd]$")
    names = [
        " ".join(words[n : n + 1 + ("=" not in word)])
        for n, word in enumerate(words)
        if flags.match(word)
    ]
    why = "this YAML was not read, and verl's own defaults are assumed. Translate its keys too."
    return {name: Unread(why) for name in names}


def _parsed(text: str) -> Any:
    """Parse a value. If the shell has to compute it (`$((2 * N))`), return it as an `ast.Name`."""
    if "$" in text:
        return ast.Name(text)
    try:
        return parsed(text)
    except YAMLError:
        return text


def _values(key: str, value: ast.expr) -> dict[str, Any]:
    """Return the value of a literal or of a call of `load_dataset`, by key.

    For any other expression return its syntax tree.
    """
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("load_dataset"):
        return _source(key, value)
    with suppress(ValueError):
        return {key: ast.literal_eval(value)}
    return {key: value}


def _source(key: str, call: ast.Call) -> dict[str, Any]:
    """Return a call of `load_dataset` as a source of raypo, and a reason for each argument left."""
    names = ("path", "name", "data_dir", "data_files", "split")
    given = dict(zip(names, call.args, strict=False))
    given |= {each.arg or "**": each.value for each in call.keywords}
    known: dict[str, Any] = {}
    for name, value in given.items():
        with suppress(ValueError):
            known[name] = ast.literal_eval(value)
    path, files = known.get("path"), known.get("data_files")
    split = known.get("split") or "train"
    if path in ("json", "csv", "parquet"):  # a reader of files
        files = files.get(split.partition("[")[0]) if isinstance(files, dict) else files
        source = [files] if isinstance(files, str) else files
        if not source or not all(str(each).lower().endswith(DATA_FILES) for each in source):
            return {key: call}
        used = {"path", "data_files"} | ({"split"} if re.fullmatch(r"\w+", split) else set())
    elif isinstance(path, str):
        source = {"path": path, "config": known.get("name"), "split": split}
        source = source if source["config"] or split != "train" else path
        used = {"path", "name", "split"}
    else:
        return {key: call}
    why = "a source has no such option in raypo. Check that its rows are the same."
    left = [
        f"{key}, load_dataset({name}={ast.unparse(value)})"
        for name, value in given.items()
        if name not in used & known.keys() and known.get(name, name) is not None
    ]
    return {key: source} | {name: Unread(why) for name in left}
