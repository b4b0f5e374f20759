"""Checks of Ray's prerequisites on this machine: a reachable address, or writable folders for a
local Ray.

They do not import Ray, so they finish within a second, unless an address does not answer.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlparse

from raypo.config import ClusterSection, ConfigError

PROBE_TIMEOUT_S = 5.0
"""Timeout of the probe of an address, in seconds, before Ray itself connects."""
_LONGEST_SOCKET = 107
"""Maximum length of a Unix socket path, in bytes."""
_SESSION = "ray/session_2026-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""Socket of a local Ray below its temporary folder."""


def check_machine(section: ClusterSection) -> None:
    """Refuse to start if Ray could not be reached or started.

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
    """Return the cluster's address and the setting that gives it. None means a local Ray."""
    if section.address:
        return section.address, "cluster.address"
    return os.environ.get("RAY_ADDRESS") or None, "RAY_ADDRESS"


def check_address(address: str, source: str) -> None:
    """Refuse an address where nothing listens; Ray itself would retry for minutes.

    Raises:
        ConfigError: the address is malformed or unreachable, or one of Ray Client.
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
    if error := refusal(address):
        raise ConfigError(
            f"{source} ({address}): nothing listens there ({error}). Start the cluster "
            f"(ray start --head), correct the address, or leave it out for a local Ray."
        )


def ray_temporary_folder() -> Path:
    """Return the folder of a local Ray's sessions. Ray creates it."""
    return _temporary_root()[1] / "ray"


def _temporary_root() -> tuple[str, Path]:
    """Return the variable that names Ray's root for temporary files, and the root."""
    # The order in which Ray looks (ray._common.utils.get_default_system_temp_dir).
    named = [name for name in ("RAY_TMPDIR", "TMPDIR") if name in os.environ]
    variable = named[0] if named else "RAY_TMPDIR"
    return variable, Path(os.environ[variable] if named else "/tmp")


def check_folders() -> None:
    """Refuse to start a local Ray if it cannot write its files; its own errors name no remedy.

    Raises:
        ConfigError: a folder is not writable, or its path is too long.
    """
    variable, root = _temporary_root()
    remedy = "Set RAY_TMPDIR to a short path of a folder that you may write to."
    if reason := _why_not_writable(root / "ray"):
        raise ConfigError(
            f"{variable} ({root}): Ray writes the files of its sessions to {root / 'ray'}, but "
            f"this failed ({reason}). {remedy}"
        )
    longest = len(os.fsencode(root / _SESSION.format(pid=os.getpid())))
    if longest > _LONGEST_SOCKET:
        raise ConfigError(
            f"{variable} ({root}): the path is {longest - _LONGEST_SOCKET} bytes too long for the "
            f"sockets that Ray creates below it. {remedy}"
        )
    writes_token = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and not saved_token()
    if writes_token and (reason := _why_not_writable(Path.home() / ".ray")):
        raise ConfigError(
            f"HOME ({Path.home()}): Ray writes its token to {Path.home() / '.ray'}, but this "
            f"failed ({reason}). Set HOME to a folder that you may write to, or RAY_AUTH_TOKEN to "
            "a secret of your own."
        )


def _why_not_writable(folder: Path) -> str | None:
    """Create a folder if needed. Return why no file can be written there, or None."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror
    return None


def refusal(address: str) -> OSError | None:
    """Return the error of connecting to host:port, or None."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None


def saved_token() -> str | None:
    """Return Ray's authentication token, or None."""
    # Ray looks in the same three places, in this order.
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
