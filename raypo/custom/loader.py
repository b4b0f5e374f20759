"""Functions and classes by import path: `file.py:name` or `package.module:name`.

`key` is always the config key that the import path comes from; error messages begin with it.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from raypo.config import ConfigError
from raypo.custom.errors import located_text

Methods = Mapping[str, Sequence[str]]
"""Names of methods that a class must or may have -> the parameters that each is called with."""
NONE: Methods = MappingProxyType({})
TAKES = {
    "ppo.policy_loss": "the tokens",
    "ppo.advantage": "the step",
    "ppo.shaping.function": "the step",
    "callbacks": "the step",
}
"""Config key -> description of the argument of its function. Functions of other keys get a list of
rollouts."""
GROUND_TRUTH = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a reward function of verl's form. The last one is optional."""
_importing: list[str] = []
_MODULE_OF_FILE = "raypo_function_file"
"""Prefix of the names of modules that are loaded from a `file.py:name`."""


def check_function(spec: str, *, key: str = "reward.function") -> None:
    """Check in the source that a function exists and takes one argument, without importing it.

    The check takes milliseconds even if the file would load a model on import, and it works on
    machines without the packages that the file needs.

    Args:
        spec: Import path.
        key: Config key that it comes from.

    Raises:
        ConfigError: `spec` is malformed, the file or module is missing or not Python, the name is
            not defined in it, or it cannot be called with one argument.
    """
    if (outline := _outline(spec, key)) is not None:
        check_callable(outline, name=spec, key=key)


def load_function(spec: str, *, key: str = "reward.function") -> Callable[..., Any]:
    """Import a function.

    A file is imported once per process, and its folder is added to `sys.path`.

    Args:
        spec: Import path.
        key: Config key that it comes from.

    Returns:
        The function, checked by `check_callable`.

    Raises:
        ConfigError: as `check_function`, or the import fails.
    """
    function = _imported(spec, key)
    check_callable(function, name=spec, key=key)
    return function


def check_callable(function: Any, *, name: str, key: str = "reward.function") -> None:
    """Check that an object can be called with one argument.

    A reward function of TRL's form is accepted too.

    Args:
        function: A function, or an object with `__call__`.
        name: Name of the function in messages.
        key: Config key that the function comes from.

    Raises:
        ConfigError: the object is a class, is not callable, or needs other arguments.
    """
    is_reward = key not in TAKES
    takes = TAKES.get(key, "a list of rollouts")
    if isinstance(function, type) or not callable(function):
        what = "a class" if isinstance(function, type) else f"of type {type(function).__name__}"
        raise ConfigError(
            f"{key} ({name}): it is {what}, not a function. Give a function, or an object "
            f"with __call__, that takes {takes}."
        )
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # compiled, without a signature
        return
    if is_reward and takes_columns(function):
        return
    if is_reward and takes_ground_truth(function):
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
            f"{key} ({name}): it is called with one argument, {takes}, but it has the parameters "
            f"{signature}. Give a function like def score({takes.split()[-1]}): ..."
        ) from None


def takes_columns(function: Any) -> bool:
    """Return whether a reward function has the form `f(prompts, completions, **columns)` of TRL.

    A decorator's `wrapper(*args, **kwargs)` has the form of the function that it wraps.
    """
    return "completions" in _parameters(function)


def takes_ground_truth(function: Any) -> bool:
    """Return whether a reward function has the form of verl, which is called once per response:
    `compute_score(data_source, solution_str, ground_truth, extra_info)`.

    Args:
        function: The function, or its import path, whose source is read and not imported.
    """
    if isinstance(function, str):
        function = _outline(function, "reward.function")
    return _parameters(function) >= set(GROUND_TRUTH[:3])


def _parameters(function: Any) -> set[str]:
    """Return the names of a function's parameters, and of those of a function that it wraps."""
    try:
        return set(keyword_parameters(function))
    except (TypeError, ValueError):
        return set()


def keyword_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters that a function can be called with by name.

    A decorated function that passes any keywords on (`**kwargs`) has those of the wrapped function
    too, and takes any keywords only if the wrapped function does.

    Raises:
        TypeError, ValueError: the function has no signature.
    """
    own = dict(inspect.signature(function, follow_wrapped=False).parameters)
    if any(each.kind is each.VAR_KEYWORD for each in own.values()):
        inner = inspect.signature(function).parameters
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        own = {name: each for name, each in own.items() if each.kind not in variable} | dict(inner)
    return own


def required_columns(function: Callable[..., Any] | str) -> list[str]:
    """Return the columns that a TRL-style reward function requires as arguments.

    Args:
        function: The function or its import path, whose source is read without importing it.

    Raises:
        ConfigError: as `check_function`.
    """
    outline = _outline(function, "reward.function") if isinstance(function, str) else function
    if outline is None or not takes_columns(outline):
        return []
    parameters = inspect.signature(outline, follow_wrapped=False).parameters.values()
    named = [
        each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    given = ("prompts", "completions", "completion_ids")
    return [each.name for each in named if each.default is each.empty and each.name not in given]


def check_class(
    spec: str,
    methods: Methods,
    arguments: Mapping[str, Any],
    *,
    key: str,
    optional: Methods = NONE,
) -> None:
    """Check in the source that `load_class` can use a class, without importing the class.

    Args:
        spec: Import path.
        methods: Required methods and their parameters.
        arguments: Keyword arguments of the constructor, from `{key}_args`.
        key: Config key that the import path comes from.
        optional: Optional methods and their parameters.

    Raises:
        ConfigError: as `check_function`, a method is missing or has other parameters, or the class
            does not take the arguments. `load_class` checks methods that a base class may define.
    """
    if (outline := _outline(spec, key)) is not None:
        _check_methods(outline, methods, optional, spec, key)
        _check_arguments(outline, arguments, spec, key)


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
        key: Config key that the import path comes from.
        optional: Optional methods and their parameters.

    Returns:
        A partial that creates an object when called.

    Raises:
        ConfigError: as `check_class`, or the import fails.
    """
    cls = _imported(spec, key)
    _check_methods(cls, methods, optional, spec, key)
    _check_arguments(cls, arguments, spec, key)
    return partial(cls, **arguments)


def check_factory(spec: str, arguments: Mapping[str, Any], *, key: str) -> None:
    """Check in the source that a function takes keyword arguments, without importing it.

    Args:
        spec: Import path.
        arguments: The keyword arguments, from `{key}_args`.
        key: Config key that they come from.

    Raises:
        ConfigError: as `check_function`, or the function does not take the arguments.
    """
    if (outline := _outline(spec, key)) is not None:
        _check_arguments(outline, arguments, spec, key)


def load_factory(spec: str, *, key: str) -> Callable[..., Any]:
    """Import a function, whatever its parameters.

    Raises:
        ConfigError: the import fails, or the module has no such name.
    """
    return _imported(spec, key)


def source_files(spec: str) -> list[Path]:
    """Return the file that defines a function or class, and the files beside it that it imports.

    For `package.module:name` only the module's own file is returned, because its imports could lead
    to the whole package. The list is empty if there is no such file, or only a compiled one.
    """
    try:
        place, _ = _parts(spec, "")  # a lambda or closure of Python has no import path
        found = _module_source(place, spec, "") if place[-3:] != ".py" else Path(place).expanduser()
    except ConfigError:
        return []
    if found is None or not found.is_file():
        return []
    files = [found.absolute()]
    for file in files if place.endswith(".py") else ():  # the list grows during the loop
        files += [each for each in _neighbours(file) if each not in files]
    return files


def _neighbours(file: Path) -> list[Path]:
    """Return the local files that a file's import statements name.

    An absolute import is looked up in the file's own folder.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[Path] = []
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
            for end in range(1, len(parts) + 1):
                path = folder.joinpath(*parts[:end])
                found += filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py"))
    return list(dict.fromkeys(found))


def imported_now() -> str | None:
    """Return the import path that this process is importing, or None."""
    return _importing[-1] if _importing else None


def function_name(function: Callable[..., Any] | str) -> str:
    """Return a function's name for messages: package.module.name, or file.py:name as in configs.

    A partial has the name of the function that it wraps. An object with a `__str__` has that text,
    any other object the name of its class. An import path is returned as it is.
    """
    while isinstance(function, partial):
        function = function.func
    if type(function).__str__ is not object.__str__ and not inspect.isroutine(function):
        with suppress(Exception):  # the object's __str__ may raise
            return str(function)
    has_name = isinstance(getattr(function, "__qualname__", None), str)
    named: Any = function if has_name else type(function)
    name, module = named.__qualname__, getattr(named, "__module__", None)
    if not module or not module.startswith(_MODULE_OF_FILE):
        return f"{module}.{name}" if module else name
    file = getattr(sys.modules.get(module), "__file__", None)
    return f"{Path(file).name}:{name}" if file else name


def _check_methods(cls: Any, methods: Methods, optional: Methods, spec: str, key: str) -> None:
    def refused(problem: str) -> ConfigError:
        wanted = ", ".join(f"{method}({', '.join(given)})" for method, given in methods.items())
        return ConfigError(f"{key} ({spec}): must be a class with {wanted}, but {problem}.")

    if not isinstance(cls, type):
        raise refused(f"it is a {type(cls).__name__}")
    for name, parameters in {**methods, **optional}.items():
        if name in optional and not hasattr(cls, name):
            continue
        if not callable(method := getattr(cls, name, None)):
            raise refused(f"it has no {name}")
        try:
            inspect.signature(method).bind(None, *parameters)
        except TypeError:
            given = inspect.signature(method)
            raise refused(f"its {name} has the parameters {given}") from None


def _check_arguments(cls: Any, arguments: Mapping[str, Any], spec: str, key: str) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{key}_args ({dict(arguments)}): {spec} cannot be made with them: {error}. Its "
            f"parameters are {signature}; set {key}_args to fit."
        ) from None


def _imported(spec: str, key: str) -> Any:
    """Import the module and return the named object."""
    place, name = _parts(spec, key)
    _importing.append(spec)
    try:
        if place.endswith(".py"):
            module = _module_of_file(_existing(place, spec, key))
        else:
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} ({spec}): {place} cannot be imported: {located_text(error)}. "
            "Correct it, or install what it needs on every node."
        ) from error
    finally:
        _importing.pop()
    found = getattr(module, name, None)
    if found is None:
        raise _no_such_name(name, [n for n in vars(module) if n[0] != "_"], spec, place, key)
    return found


def _outline(spec: str, key: str) -> Any:
    """Return a stub of a function or class, with the same parameters and no code.

    A stub of a class has stubs of its methods. None means that only an import can show the
    parameters.
    """
    place, name = _parts(spec, key)
    if place.endswith(".py"):
        source = _existing(place, spec, key)
    elif (source := _module_source(place, spec, key)) is None:
        return None  # a compiled module
    try:
        tree = ast.parse(source.read_bytes(), filename=str(source))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(
            f"{key} ({spec}): {source}{line} is not Python: {error.args[0]}. Correct the file."
        ) from None
    defined = dict(_defined(tree))
    if name not in defined and not {"*", "__getattr__"} & defined.keys():
        raise _no_such_name(name, list(defined), spec, str(source), key)
    match defined.get(name):
        case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
            return _outline_of_function(function)
        case ast.ClassDef() as cls:
            kind = _WithAnyMethod if cls.bases else type
            methods = {
                each.name: _outline_of_function(each)
                for each in cls.body
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if cls.decorator_list or cls.keywords:  # a dataclass, say, generates its __init__
                methods["__init__"] = _takes_anything
            elif cls.bases or {"__init__", "__new__"} & dict(_defined(cls)).keys():
                methods.setdefault("__init__", _takes_anything)
            return kind(name, (), methods)
    return None


class _WithAnyMethod(type):
    """Metaclass for the stub of a class that may inherit any method from its base classes."""

    def __getattr__(cls, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _takes_anything


def _takes_anything(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function whose parameters only an import can show."""


def _outline_of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    """Return a function with the same parameters, without evaluating any user code."""
    if node.decorator_list:  # a decorator may change the parameters
        return _takes_anything
    given = node.args
    for each in ast.walk(given):
        if isinstance(each, ast.arg):
            each.annotation = None
    defaults = tuple(map(_SourceText, map(ast.unparse, given.defaults)))
    of_keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    keyword_defaults = {a.arg: _SourceText(ast.unparse(d)) for a, d in of_keywords if d}
    given.defaults = [ast.Constant(None) for _ in given.defaults]
    given.kw_defaults = [each and ast.Constant(None) for each in given.kw_defaults]
    outline = ast.fix_missing_locations(ast.Expression(ast.Lambda(given, ast.Constant(None))))
    function = eval(compile(outline, "<outline>", "eval"))
    function.__defaults__, function.__kwdefaults__ = defaults or None, keyword_defaults or None
    return function


class _SourceText(str):
    """Default of a parameter as the source has it, which messages show without quotes."""

    __repr__ = str.__str__


def _defined(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a module's statements define, in all branches, with their nodes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name, child
        elif isinstance(child, ast.alias):
            yield child.asname or child.name.split(".")[0], child
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id, child
        else:
            yield from _defined(child)


def _parts(spec: str, key: str) -> tuple[str, str]:
    if spec.startswith("__main__:"):
        raise ConfigError(
            f"{key} ({spec}): this function exists only in a Python script. Start the script "
            f"again, or set {key} to file.py:name."
        )
    place, _, name = spec.rpartition(":")
    parts = [name] if place.endswith(".py") else [name, *place.split(".")]
    if place and all(part.isidentifier() for part in parts):
        return place, name
    raise ConfigError(
        f"{key} ({spec}): a function is named file.py:name or package.module:name. Write it like "
        "rewards.py:score."
    )


def _existing(place: str, spec: str, key: str) -> Path:
    path = Path(place).expanduser().absolute()
    if path.is_file():
        return path
    raise ConfigError(
        f"{key} ({spec}): there is no file {path}. Correct the path; a relative path starts at "
        "the folder in which raypo is started."
    )


def _module_source(module: str, spec: str, key: str) -> Path | None:
    """Return a module's source file without importing its parents.

    The result is None if the module is compiled.
    """
    first, *rest = module.split(".")
    found = None
    with suppress(ValueError):  # a module without a spec, like __main__
        found = importlib.util.find_spec(first)
    if found and not rest:
        is_source = found.origin is not None and found.origin.endswith(".py")
        return Path(found.origin) if is_source and found.origin else None
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder, *rest)
        for source in (path.with_suffix(".py"), path / "__init__.py"):
            if source.is_file():
                return source
        if any(path.parent.glob(f"{path.name}.*")):
            return None
    raise ConfigError(
        f"{key} ({spec}): there is no module {module}. Install it, put its folder on "
        f"PYTHONPATH, or give the file: path/to/{module.rpartition('.')[2]}.py:name."
    )


def _no_such_name(name: str, defined: list[str], spec: str, place: str, key: str) -> ConfigError:
    near = difflib.get_close_matches(name, defined, n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]}?" if near else f"Define it there, or correct {key}."
    return ConfigError(f"{key} ({spec}): {place} defines no {name}. {hint}")


def _module_of_file(path: Path) -> ModuleType:
    # The digest tells my-task/reward.py from my_task/reward.py.
    readable, digest = re.sub(r"\W", "_", path.as_posix()), zlib.crc32(os.fsencode(path))
    name = f"{_MODULE_OF_FILE}{readable}_{digest:08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import the files beside it
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
