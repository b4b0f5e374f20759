"""Checks of Ray's prerequisites on this machine: a reachable address, or writable folders for a
local Ray.

They do not import Ray, so they finish within a second, unless an address does not respond.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlparse

from raypo.config import ClusterSection, ConfigError

PROBE_TIMEOUT_S = 5.0
"""Timeout in seconds for probing an address before Ray itself connects."""
_MAX_SOCKET_BYTES = 107
"""Maximum length of a Unix socket path, in bytes."""
_SOCKET_PATH = "ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Path of a local Ray's socket, relative to the root for temporary files."""


def check_machine(section: ClusterSection) -> None:
    """Check that Ray can be reached, or that a local Ray can be started.

    Raises:
        ConfigError: the address is malformed or unreachable, a folder is not writable, or its path
            is too long.
    """
    address, source = cluster_address(section)
    if address:
        check_address(address, source)
    else:
        check_folders()


def cluster_address(section: ClusterSection) -> tuple[str | None, str]:
    """Return the cluster's address and the setting it comes from. None means a local Ray."""
    if section.address:
        return section.address, "cluster.address"
    return os.environ.get("RAY_ADDRESS") or None, "RAY_ADDRESS"


def check_address(address: str, source: str) -> None:
    """Check that something listens at an address. Ray itself would retry for minutes.

    Raises:
        ConfigError: the address is malformed or unreachable, or it is a Ray Client address.
    """
    if address in ("auto", "local"):
        return
    if address.startswith("ray://"):
        raise ConfigError(
            f"{source} ({address}): Ray Train does not run through Ray Client. Start raypo on a "
            f"node of the cluster with the address host:port, or with `ray job submit`."
        )
    try:
        parsed = urlparse(f"ray-gcs://{address}")
        is_complete = bool(parsed.hostname and parsed.port)
    except ValueError:  # the port is not a number, or too large
        is_complete = False
    if not is_complete:
        raise ConfigError(
            f"{source} ({address}): an address is host:port, with a port up to 65535. Correct it, "
            "or leave it out for a local Ray."
        )
    if error := connection_error(address):
        raise ConfigError(
            f"{source} ({address}): nothing listens there ({error}). Start the cluster "
            f"(ray start --head), correct the address, or leave it out for a local Ray."
        )


def ray_temporary_folder() -> Path:
    """Return the folder of a local Ray's sessions, which Ray creates."""
    return _temporary_root()[1] / "ray"


def _temporary_root() -> tuple[str, Path]:
    """Return the variable that sets Ray's root for temporary files, and the root."""
    # Ray checks the variables in this order (ray._common.utils.get_default_system_temp_dir).
    set_variables = [name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ]
    variable = set_variables[0] if set_variables else "RAY_TMPDIR"
    return variable, Path(os.environ[variable] if set_variables else "/tmp")


def check_folders() -> None:
    """Check that a local Ray can write its files. Ray's own errors do not suggest a remedy.

    Raises:
        ConfigError: a folder is not writable, or its path is too long.
    """
    variable, root = _temporary_root()
    remedy = "Set RAY_TMPDIR to a short path of a folder that you may write to."
    if reason := _write_error(root / "ray"):
        raise ConfigError(
            f"{variable} ({root}): Ray writes the files of its sessions to {root / 'ray'}, but "
            f"this failed ({reason}). {remedy}"
        )
    num_bytes = len(os.fsencode(root / _SOCKET_PATH.format(pid=os.getpid())))
    if num_bytes > _MAX_SOCKET_BYTES:
        raise ConfigError(
            f"{variable} ({root}): the path is {num_bytes - _MAX_SOCKET_BYTES} bytes too long for "
            f"the sockets that Ray creates below it. {remedy}"
        )
    writes_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and not saved_token()
    if writes_token and (reason := _write_error(Path.home() / ".ray")):
        raise ConfigError(
            f"HOME ({Path.home()}): Ray writes its token to {Path.home() / '.ray'}, but this "
            f"failed ({reason}). Set HOME to a folder that you may write to, or RAY_AUTH_TOKEN to "
            "a secret of your own."
        )


def _write_error(folder: Path) -> str | None:
    """Create a folder if needed. Return the reason why it is not writable, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror
    return None


def connection_error(address: str) -> OSError | None:
    """Try to connect to host:port, and return the error, or None if it succeeded."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def saved_token() -> str | None:
    """Return Ray's authentication token, or None."""
    # Ray checks the same three locations in this order.
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    token_path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(token_path) if token_path else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
