"""Load functions and classes by import path: `file.py:name` or `package.module:name`.

`key` is always the config key of the import path. Error messages start with it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from raypo.config import ConfigError
from raypo.custom.errors import located_text

Methods = Mapping[str, Sequence[str]]
"""Maps names of required or optional methods to the parameters they are called with."""
NONE: Methods = MappingProxyType({})
TAKES = {
    "ppo.policy_loss": "the tokens",
    "ppo.advantage": "the step",
    "ppo.shaping.function": "the step",
    "callbacks": "the step",
}
"""Maps a config key to the description of its function's argument. Functions of other keys are
called with a list of rollouts."""
GROUND_TRUTH = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a reward function in verl's form. The last argument is optional."""
_VARIADIC_KINDS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_import_stack: list[str] = []
_MODULE_OF_FILE = "raypo_function_file"
"""Prefix of the names of modules that are loaded from a file (`file.py:name`)."""


def load_function(spec: str, *, key: str = "reward.function") -> Callable[..., Any]:
    """Import a function.

    A file is imported only once per process, and its folder is added to `sys.path`.

    Args:
        spec: Import path.
        key: Config key of the import path.

    Returns:
        The function, checked by `check_callable`.

    Raises:
        ConfigError: `spec` is malformed, the file or module is missing, its import fails, it does
            not define the name, or the function cannot be called with one argument.
    """
    function = _import_object(spec, key)
    check_callable(function, name=spec, key=key)
    return function


def check_callable(function: Any, *, name: str, key: str = "reward.function") -> None:
    """Check that an object can be called with one argument.

    Reward functions in the forms of TRL and verl are also accepted.

    Args:
        function: A function, or an object with `__call__`.
        name: Name of the function in messages.
        key: Config key of the function.

    Raises:
        ConfigError: the object is a class, is not callable, or needs other arguments.
    """
    is_reward_key = key not in TAKES
    argument = TAKES.get(key, "a list of rollouts")
    if isinstance(function, type) or not callable(function):
        kind = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(
            f"{key} ({name}): it is {kind}, not a function. Give a function, or an object "
            f"with __call__, that takes {argument}."
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # a compiled function may have no signature
        return
    if is_reward_key and takes_columns(function):
        return
    if is_reward_key and takes_ground_truth(function):
        try:
            signature.bind(**dict.fromkeys(GROUND_TRUTH))
        except TypeError:
            raise ConfigError(
                f"{key} ({name}): has the form of a verl function, which is called with "
                f"{', '.join(GROUND_TRUTH)}, but it has the parameters {signature}. Give all "
                "other parameters a default."
            ) from None
        return
    try:
        signature.bind([])
    except TypeError:
        raise ConfigError(
            f"{key} ({name}): it is called with one argument, {argument}, but it has the "
            f"parameters {signature}. Give a function like def score({argument.split()[-1]}): ..."
        ) from None


def takes_columns(function: Any) -> bool:
    """Return whether a reward function has TRL's form, `f(prompts, completions, **columns)`.

    A decorator's `wrapper(*args, **kwargs)` has the form of the wrapped function.
    """
    return "completions" in _parameters(function)


def takes_ground_truth(function: Any) -> bool:
    """Return whether a reward function has verl's form, which is called once per response:
    `compute_score(data_source, solution_str, ground_truth, extra_info)`.
    """
    return _parameters(function) >= set(GROUND_TRUTH[:3])


def _parameters(function: Any) -> set[str]:
    """Return the parameter names of a function and of the function that it wraps."""
    try:
        return set(keyword_parameters(function))
    except (TypeError, ValueError):
        return set()


def keyword_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function that can be passed by name.

    A decorated function with `**kwargs` also has the parameters of the wrapped function. It accepts
    arbitrary keywords only if the wrapped function does.

    Raises:
        TypeError, ValueError: the function has no signature.
    """
    parameters = dict(inspect.signature(function, follow_wrapped=False).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        parameters = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind not in _VARIADIC_KINDS
        }
        parameters |= inspect.signature(function).parameters
    return parameters


def required_columns(function: Callable[..., Any]) -> list[str]:
    """Return the columns that a reward function in TRL's form requires as arguments."""
    if not takes_columns(function):
        return []
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    required = [
        p.name for p in parameters if p.kind not in _VARIADIC_KINDS and p.default is p.empty
    ]
    return [name for name in required if name not in ("prompts", "completions", "completion_ids")]


def load_class(
    spec: str,
    methods: Methods,
    arguments: Mapping[str, Any],
    *,
    key: str,
    optional: Methods = NONE,
) -> partial[Any]:
    """Import a class and bind its keyword arguments.

    Args:
        spec: Import path.
        methods: Required methods and their parameters.
        arguments: Keyword arguments of the constructor, from `{key}_args`.
        key: Config key of the import path.
        optional: Optional methods and their parameters.

    Returns:
        A partial that creates an object when it is called.

    Raises:
        ConfigError: the import fails (see `load_function`), a method is missing or has different
            parameters, or the class does not accept the arguments.
    """
    cls = _import_object(spec, key)
    _check_methods(cls, methods, optional, spec, key)
    _check_arguments(cls, arguments, spec, key)
    return partial(cls, **arguments)


def load_factory(spec: str, arguments: Mapping[str, Any], *, key: str) -> Callable[..., Any]:
    """Import a function that is called with keyword arguments.

    Args:
        spec: Import path.
        arguments: The keyword arguments, from `{key}_args`.
        key: Config key of the import path.

    Raises:
        ConfigError: the import fails, the module has no such name, or the function does not accept
            the arguments.
    """
    factory = _import_object(spec, key)
    _check_arguments(factory, arguments, spec, key)
    return factory


def source_files(spec: str) -> list[Path]:
    """Return the file that defines a function or class, and the neighbouring files it imports.

    For `package.module:name`, only the module's own file is returned, because its imports could
    lead to the whole package. The list is empty if there is no source file.
    """
    try:
        location, _ = _split_spec(spec, "")  # a lambda or closure has no import path
    except ConfigError:
        return []
    is_file = location.endswith(".py")
    file = Path(location).expanduser() if is_file else _file_of_module(location)
    if file is None or not file.is_file():
        return []
    files = [file.absolute()]
    for file in files if is_file else ():  # the list grows during the loop
        files += [neighbour for neighbour in _neighbours(file) if neighbour not in files]
    return files


def _file_of_module(module: str) -> Path | None:
    """Return a module's source file, or None if there is none. Does not import its packages."""
    package, *submodules = module.split(".")
    spec = None
    with suppress(ValueError):  # some modules have no spec, like __main__
        spec = importlib.util.find_spec(package)
    for name in submodules:
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations or ())
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _neighbours(file: Path) -> list[Path]:
    """Return the local files that a file's import statements refer to.

    Absolute imports are looked up in the file's own folder.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    files: list[Path] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            level, names = 0, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = f"{node.module}." if node.module else ""
            level, names = node.level, [f"{parent}{alias.name}" for alias in node.names]
        else:
            continue
        folder = file.parents[min(max(level - 1, 0), len(file.parents) - 1)]
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                path = folder.joinpath(*parts[:length])
                files += filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return list(dict.fromkeys(files))


def current_import() -> str | None:
    """Return the import path that this process is currently importing, or None."""
    return _import_stack[-1] if _import_stack else None


def function_name(function: Callable[..., Any] | str) -> str:
    """Return a function's name for messages: package.module.name, or file.py:name as in configs.

    For a partial, this is the name of the wrapped function. For an object, it is the object's
    `__str__` if it defines one, otherwise the name of its class. An import path is returned
    unchanged.
    """
    while isinstance(function, partial):
        function = function.func
    if type(function).__str__ is not object.__str__ and not inspect.isroutine(function):
        with suppress(Exception):  # the object's __str__ may raise
            return str(function)
    has_name = isinstance(getattr(function, "__qualname__", None), str)
    named_object: Any = function if has_name else type(function)
    name, module = named_object.__qualname__, getattr(named_object, "__module__", None)
    if not module or not module.startswith(_MODULE_OF_FILE):
        return f"{module}.{name}" if module else name
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{Path(file).name}:{name}" if file else name


def _check_methods(cls: Any, methods: Methods, optional: Methods, spec: str, key: str) -> None:
    def class_error(problem: str) -> ConfigError:
        required_methods = ", ".join(
            f"{method}({', '.join(names)})" for method, names in methods.items()
        )
        return ConfigError(
            f"{key} ({spec}): must be a class with {required_methods}, but {problem}."
        )

    if not isinstance(cls, type):
        raise class_error(f"it is a {type(cls).__name__}")
    for name, parameters in {**methods, **optional}.items():
        if name in optional and not hasattr(cls, name):
            continue
        if not callable(method := getattr(cls, name, None)):
            raise class_error(f"it has no {name}")
        try:
            inspect.signature(method).bind(None, *parameters)
        except TypeError:
            signature = inspect.signature(method)
            raise class_error(f"its {name} has the parameters {signature}") from None


def _check_arguments(cls: Any, arguments: Mapping[str, Any], spec: str, key: str) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}_args ({dict(arguments)}): {spec} cannot be made with them: {error}. Its "
            f"parameters are {signature}; set {key}_args to fit."
        ) from None


def _import_object(spec: str, key: str) -> Any:
    """Import the module and return the named object."""
    location, name = _split_spec(spec, key)
    _import_stack.append(spec)
    try:
        if location.endswith(".py"):
            module = _module_of_file(_existing_file(location, spec, key))
        else:
            module = importlib.import_module(location)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        missing_module = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing_module and f"{location}.".startswith(f"{missing_module}."):
            raise ConfigError(
                f"{key} ({spec}): there is no module {location}. Install it, put its folder on "
                f"PYTHONPATH, or give the file: path/to/{location.rpartition('.')[2]}.py:name."
            ) from None
        raise ConfigError(
            f"{key} ({spec}): {location} cannot be imported: {located_text(error)}. "
            "Correct it, or install what it needs on every node."
        ) from error
    finally:
        _import_stack.pop()
    if (value := getattr(module, name, None)) is not None:
        return value
    close_matches = difflib.get_close_matches(
        name, [variable for variable in vars(module) if variable[0] != "_"], n=1
    )
    hint = (
        f"Did you mean {close_matches[0]}?"
        if close_matches
        else f"Define it there, or correct {key}."
    )
    raise ConfigError(f"{key} ({spec}): {location} defines no {name}. {hint}")


def _split_spec(spec: str, key: str) -> tuple[str, str]:
    if spec.startswith("__main__:"):
        raise ConfigError(
            f"{key} ({spec}): this function exists only in a Python script. Start the script "
            f"again, or set {key} to file.py:name."
        )
    location, _, name = spec.rpartition(":")
    parts = [name] if location.endswith(".py") else [name, *location.split(".")]
    if location and all(part.isidentifier() for part in parts):
        return location, name
    raise ConfigError(
        f"{key} ({spec}): a function is named file.py:name or package.module:name. Write it like "
        "rewards.py:score."
    )


def _existing_file(name: str, spec: str, key: str) -> Path:
    path = Path(name).expanduser().absolute()
    if path.is_file():
        return path
    raise ConfigError(
        f"{key} ({spec}): there is no file {path}. Correct the path; a relative path starts at "
        "the folder in which raypo is started."
    )


def _module_of_file(path: Path) -> ModuleType:
    # The digest distinguishes my-task/reward.py from my_task/reward.py.
    readable, digest = re.sub(r"\W", "_", path.as_posix()), zlib.crc32(os.fsencode(path))
    name = f"{_MODULE_OF_FILE}{readable}_{digest:08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import neighbouring files
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before the module runs, because dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
