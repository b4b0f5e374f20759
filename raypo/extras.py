"""Packages of the optional extras (`pip install 'raypo[report]'`), which the core does not need."""

from __future__ import annotations

from importlib.util import find_spec

from raypo.config import ConfigError

_REPORT = ("jinja2", "plotly", "scipy")
EXTRAS = {
    "images": ("torchvision",),
    "report": _REPORT,
    "serve": ("httpx", "starlette", "tenacity", "uvicorn"),
    "sweep": ("optuna", *_REPORT),  # a sweep writes its report page at the end
    "verifiers": ("verifiers", "openai"),
}
"""Packages by extra. Verifiers environments also need the extra serve, for their endpoint."""


def require(extra: str, use: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Args:
        extra: A key of `EXTRAS`.
        use: Config key with its value, or command, that needs the extra. Error messages start with
            it.

    Raises:
        ConfigError: a package is missing.
    """
    missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{use}: needs the package {missing[0]}, which is not installed. "
            f"pip install 'raypo[{extra}]' on every node."
        )
