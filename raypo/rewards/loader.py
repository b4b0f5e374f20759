"""From `file.py:name` or `package.module:name` to a function or a class."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from raypo.config import ConfigError
from raypo.rewards.scoring import MODULE_OF_FILE

Methods = Mapping[str, Sequence[str]]
"""Names of methods, and of the parameters that each is called with."""
NONE: Methods = MappingProxyType({})
TAKES = {
    "ppo.policy_loss": "the tokens",
    "ppo.advantage": "the step",
    "ppo.shaping.function": "the step",
    "callbacks": "the step",
}
"""Config key -> the argument that its function is called with; of all others a list of rollouts."""


def check_function(spec: str, *, key: str = "reward.function") -> None:
    """Check that a function is there, from its source: nothing of the user's is imported.

    Args:
        spec: `file.py:name` or `package.module:name`.
        key: The config key that it comes from, for messages.

    Raises:
        ConfigError: it is malformed, the file or module is missing or not Python, the name is not
            defined in it, or it cannot be called with one argument.
    """
    if (node := _definition(spec, key)) is not None:
        _check_parameters(node, spec, key)


def check_class(spec: str, methods: Methods, *, key: str, optional: Methods = NONE) -> None:
    """Check that a class and its methods are there, from its source.

    Args:
        spec: `file.py:Class` or `package.module:Class`.
        methods: Of each method that it must have, the parameters that it is called with.
        key: The config key that it comes from, for messages.
        optional: The same of methods that it may have.

    Raises:
        ConfigError: what `check_function` finds, it is a function, or a method is missing or takes
            other parameters. Methods that a base class may have are left to `load_class`.
    """
    node = _definition(spec, key)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise _wrong_class("it is a function", methods, spec, key)
    if not isinstance(node, ast.ClassDef):
        return
    own = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    for name, parameters in {**methods, **optional}.items():
        if name in own and not own[name].decorator_list:
            if not _takes(own[name].args, 1 + len(parameters)):
                problem = f"its {name} has the parameters ({ast.unparse(own[name].args)})"
                raise _wrong_class(problem, methods, spec, key)
        elif name not in own and not node.bases and name in methods:
            raise _wrong_class(f"it has no {name}", methods, spec, key)


def load_class(
    spec: str,
    methods: Methods,
    arguments: Mapping[str, Any],
    *,
    key: str,
    optional: Methods = NONE,
) -> partial[Any]:
    """Import a class; what makes an object of it.

    Args:
        spec: `file.py:Class` or `package.module:Class`.
        methods: See `check_class`.
        arguments: Keywords that objects are made with; their config key is `{key}_args`.
        key: The config key that the class comes from, for messages.
        optional: See `check_class`.

    Raises:
        ConfigError: what `check_class` finds, the import fails, or it does not take the arguments.
    """
    cls = _loaded(spec, key)
    if not isinstance(cls, type):
        raise _wrong_class(f"it is of type {type(cls).__name__}", methods, spec, key)
    for name, parameters in {**methods, **optional}.items():
        method = getattr(cls, name, None)
        if method is None and name in optional:
            continue
        if not callable(method):
            raise _wrong_class(f"it has no {name}", methods, spec, key)
        try:
            inspect.signature(method).bind(None, *parameters)
        except TypeError:
            problem = f"its {name} has the parameters {inspect.signature(method)}"
            raise _wrong_class(problem, methods, spec, key) from None
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}_args ({dict(arguments)}): {spec} cannot be made with them: {error}. Its "
            f"parameters are {inspect.signature(cls)}; set {key}_args to fit."
        ) from None
    return partial(cls, **arguments)


def _definition(spec: str, key: str) -> ast.stmt | None:
    """The statement that defines what is named; None where only an import can tell."""
    place, name = _parts(spec, key)
    source = _existing(place, spec, key) if _is_file(place) else _module_source(place, spec, key)
    if source is None:
        return None  # a compiled module
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(
            f"{key} ({spec}): {source}{line} is not Python: {error.args[0]}. Correct the file."
        ) from None
    defined = dict(_top_level(tree.body))
    if name not in defined:
        if "*" in defined or "__getattr__" in defined:
            return None  # the name may come from elsewhere
        raise _no_such_name(name, list(defined), spec, str(source), key)
    return defined[name]


def load_function(spec: str, *, key: str = "reward.function") -> Callable[..., Any]:
    """Import a function. A file is imported once per process, and its folder is put on the path.

    Raises:
        ConfigError: what `check_function` finds, the import fails, or the name is not a function.
    """
    function = _loaded(spec, key)
    check_callable(function, name=spec, key=key)
    return function


def _loaded(spec: str, key: str) -> Any:
    """What is named, its module imported."""
    place, name = _parts(spec, key)
    try:
        if _is_file(place):
            module = _module_of_file(_existing(place, spec, key))
        else:
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} ({spec}): {place} cannot be imported: {type(error).__name__}: {error}. "
            "Correct it, or install what it needs on every node."
        ) from error
    found = getattr(module, name, None)
    if found is None:
        raise _no_such_name(name, [n for n in vars(module) if n[0] != "_"], spec, place, key)
    return found


def check_callable(function: Any, *, name: str, key: str = "reward.function") -> None:
    """Check that a loaded function can be called with one argument.

    Args:
        function: A function, or an object with `__call__`.
        name: What it is called, for messages.
        key: The config key or argument that it comes from, for messages.

    Raises:
        ConfigError: it is a class, cannot be called, or asks for other arguments.
    """
    if isinstance(function, type) or not callable(function):
        what = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(
            f"{key} ({name}): it is {what}, not a function. Give a function, or an object "
            f"with __call__, that takes {TAKES.get(key, 'a list of rollouts')}."
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # compiled, and it does not say
        return
    try:
        signature.bind([])
    except TypeError:
        raise _wrong_call(f"it has the parameters {signature}", name, key) from None


def _parts(spec: str, key: str) -> tuple[str, str]:
    place, _, name = spec.rpartition(":")
    parts = [name] if _is_file(place) else [name, *place.split(".")]
    if place and all(part.isidentifier() for part in parts):
        return place, name
    raise ConfigError(
        f"{key} ({spec}): a function is named file.py:name or package.module:name. "
        f"Set {key} so, for example rewards.py:score."
    )


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _existing(place: str, spec: str, key: str) -> Path:
    path = Path(place).expanduser().absolute()
    if path.is_file():
        return path
    raise ConfigError(
        f"{key} ({spec}): there is no file {path}. Correct the path; a relative one is taken from "
        "the folder that raypo is started in."
    )


def _module_source(module: str, spec: str, key: str) -> Path | None:
    """The source file of a module, found without importing its parent packages."""
    first, *rest = module.split(".")
    name = first
    try:
        found = importlib.util.find_spec(first)
    except ValueError:  # a module without a spec, like __main__
        found = None
    folders = list(found.submodule_search_locations or []) if found else []
    for part in rest:
        name = f"{name}.{part}"
        found, folders = _find_below(name, part, folders)
    if found is None:
        raise ConfigError(
            f"{key} ({spec}): there is no module {module}. Install it, put its folder on "
            f"PYTHONPATH, or give the file: path/to/{rest[-1] if rest else first}.py:name."
        )
    is_source = found.origin is not None and found.origin.endswith(".py")
    return Path(found.origin) if is_source and found.origin else None


def _find_below(name: str, part: str, folders: list[str]) -> tuple[ModuleSpec | None, list[str]]:
    """A module below a package's folders, and its own folders where it is a package."""
    try:
        found = PathFinder.find_spec(name, folders) if folders else None
    except KeyError:  # a folder without __init__.py asks for its parent, which is not imported
        return None, [str(Path(f) / part) for f in folders if (Path(f) / part).is_dir()]
    return found, list(found.submodule_search_locations or []) if found else []


def _top_level(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module's statements define, branches included, with the statement."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                names = (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
                yield from ((name, node) for name in names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for branch in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, branch, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_level(handler.body)


def _check_parameters(node: ast.stmt, spec: str, key: str) -> None:
    if isinstance(node, ast.ClassDef):
        raise _wrong_call("it is a class", spec, key)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _takes(node.args, 1):
        raise _wrong_call(f"it has the parameters ({ast.unparse(node.args)})", spec, key)


def _takes(given: ast.arguments, count: int) -> bool:
    """Whether parameters take so many arguments, none of them by name."""
    positional = len(given.posonlyargs) + len(given.args)
    has_room = positional >= count or given.vararg is not None
    return has_room and positional - len(given.defaults) <= count and None not in given.kw_defaults


def _wrong_call(problem: str, name: str, key: str) -> ConfigError:
    takes = TAKES.get(key, "the list of rollouts")
    return ConfigError(
        f"{key} ({name}): it is called with one argument, {takes}, and {problem}. "
        f"Give a function like def score({takes.split()[-1]}): ..."
    )


def _wrong_class(problem: str, methods: Methods, name: str, key: str) -> ConfigError:
    wanted = ", ".join(f"{method}({', '.join(given)})" for method, given in methods.items())
    return ConfigError(f"{key} ({name}): a class with {wanted} is wanted, and {problem}.")


def _no_such_name(name: str, defined: list[str], spec: str, place: str, key: str) -> ConfigError:
    near = difflib.get_close_matches(name, defined, n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}?" if near else f"Define it there, or correct {key}."
    return ConfigError(f"{key} ({spec}): {place} defines no {name}. {hint}")


def _module_of_file(path: Path) -> ModuleType:
    name = MODULE_OF_FILE + re.sub(r"\W", "_", path.as_posix())
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # its neighbours can be imported
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look themselves up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
