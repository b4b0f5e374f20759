"""From `file.py:name` or `package.module:name` to a function."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from raypo.config import ConfigError
from raypo.rewards.scoring import MODULE_OF_FILE


def check_function(spec: str, *, key: str = "reward.function") -> None:
    """Check that a function is there, from its source: nothing of the user's is imported.

    Args:
        spec: `file.py:name` or `package.module:name`.
        key: The config key that it comes from, for messages.

    Raises:
        ConfigError: it is malformed, the file or module is missing or not Python, the name is not
            defined in it, or it cannot be called with only the list of rollouts.
    """
    place, name = _parts(spec, key)
    source = _existing(place, spec, key) if _is_file(place) else _module_source(place, spec, key)
    if source is None:
        return  # a compiled module: only its import can tell
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
            return  # the name may come from elsewhere
        raise _no_such_name(name, list(defined), spec, str(source), key)
    _check_parameters(defined[name], spec, key)


def load_function(spec: str, *, key: str = "reward.function") -> Callable[..., Any]:
    """Import a function. A file is imported once per process, and its folder is put on the path.

    Raises:
        ConfigError: what `check_function` finds, the import fails, or the name is not a function.
    """
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
    function = getattr(module, name, None)
    if function is None:
        raise _no_such_name(name, [n for n in vars(module) if n[0] != "_"], spec, place, key)
    check_callable(function, name=spec, key=key)
    return function


def check_callable(function: Any, *, name: str, key: str = "reward.function") -> None:
    """Check that a loaded function can be called with only the list of rollouts.

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
            "with __call__, that takes a list of rollouts."
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
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        positional = len(given.posonlyargs) + len(given.args)
        required = positional - len(given.defaults)
        required_by_name = [
            a.arg for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None
        ]
        if (positional or given.vararg) and required <= 1 and not required_by_name:
            return
        raise _wrong_call(f"it has the parameters ({ast.unparse(given)})", spec, key)


def _wrong_call(problem: str, name: str, key: str) -> ConfigError:
    return ConfigError(
        f"{key} ({name}): it is called with one argument, the list of rollouts, and {problem}. "
        "Give a function like def score(rollouts): ..."
    )


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
