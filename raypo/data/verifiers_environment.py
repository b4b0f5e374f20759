"""Load environments of the package `verifiers`.

Versions 0.1.14 to 0.3 are supported. Their environments run in the worker's process. Version 0.4
has only environments that start a program for each episode, in a container or in the cloud.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

from raypo.config import ConfigError
from raypo.custom.loader import load_factory
from raypo.extras import require

OLDEST, TOO_NEW = (0, 1, 14), (0, 4)
"""Oldest supported version, and the first newer version that is not supported."""


def verifiers_factory(name: str, arguments: Mapping[str, Any], *, key: str) -> Callable[..., Any]:
    """Import an environment's `load_environment`.

    Args:
        name: Name of the environment, or a Python file.
        arguments: Keyword arguments of its `load_environment`.
        key: Config key of the name.

    Raises:
        ConfigError: the package is missing or its version is not supported, there is no such
            environment, or the environment does not take the arguments.
    """
    _check_version(name, key)
    return load_factory(factory_of(name), arguments, key=key)


def load_verifiers(name: str, arguments: Mapping[str, Any], *, key: str) -> Any:
    """Import an environment and call its `load_environment`, like the package itself.

    Args:
        name, arguments, key: as for `verifiers_factory`.

    Returns:
        A `verifiers.Environment`.

    Raises:
        ConfigError: the package or environment is missing or not supported, or `load_environment`
            raises an error or returns something else.
    """
    factory = verifiers_factory(name, arguments, key=key)
    import verifiers  # pyright: ignore[reportMissingImports]

    try:
        with _signals_kept(verifiers):
            environment = factory(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{key} (verifiers:{name}): its load_environment({dict(arguments)}) raised "
            f"{type(error).__name__}: {error}. Correct the arguments, or the environment."
        ) from error
    if not isinstance(environment, verifiers.Environment):
        raise ConfigError(
            f"{key} (verifiers:{name}): its load_environment returned a "
            f"{type(environment).__name__} instead of a verifiers.Environment."
        )
    return environment


def factory_of(name: str) -> str:
    """Return the import path of an environment's `load_environment`."""
    module = name if name.endswith(".py") else name.rpartition("/")[2].replace("-", "_")
    return f"{module}:load_environment"


def _check_version(name: str, key: str) -> None:
    require("verifiers", f"{key} (verifiers:{name})")
    installed = version("verifiers")
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if not OLDEST <= numbers < TOO_NEW:
        raise ConfigError(
            f"{key} (verifiers:{name}): verifiers {installed} is installed, but only 0.1.14 to "
            "0.3 are supported. pip install 'raypo[verifiers]' on every node."
        )


@contextmanager
def _signals_kept(verifiers: Any) -> Iterator[None]:
    """Prevent environments from replacing signal handlers.

    The handlers of SIGINT and SIGTERM belong to the run, and Python lets only the main thread
    replace them.
    """
    with patch.object(sys.modules[verifiers.Environment.__module__], "signal"):
        yield
