"""Starts Prometheus and Grafana with the files that Ray writes for them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from raypo.config import ConfigError
from raypo.metrics.monitoring.grafana import PANELS, UID, expression, grafana_dashboard

READY_TIMEOUT_S = 60.0

PROMETHEUS_MISSING = (
    "Prometheus is not installed, so there are no curves over time. Install it: Debian, Ubuntu: "
    "apt-get install prometheus; macOS: brew install prometheus; or "
    "https://prometheus.io/download."
)
GRAFANA_MISSING = (
    "Grafana is not installed; Prometheus draws the same figures plainly. Install it "
    "(https://grafana.com/docs/grafana/latest/setup-grafana/installation) and start this command "
    "again, or load the dashboard into another Grafana: raypo monitor --dashboard raypo.json."
)


@dataclass(frozen=True)
class Session:
    """The files of a Ray session that is running on this machine."""

    folder: Path

    @classmethod
    def find(cls, folder: Path) -> Session:
        """A session by its folder.

        Raises:
            ConfigError: no Ray with its metrics was started there.
        """
        session = cls(folder.resolve())
        if not session.targets.exists():
            raise ConfigError(
                f"--session ({folder}): no Ray is there that tells its metrics. Start a run or "
                "`ray start --head` on this machine first, with the dashboard (ray[default])."
            )
        return session

    @property
    def targets(self) -> Path:
        """Where Ray lists the nodes that Prometheus asks."""
        return self.folder / "prom_metrics_service_discovery.json"

    @property
    def grafana(self) -> Path:
        """Where Ray writes Grafana's configuration."""
        return self.folder / "metrics" / "grafana"


def start_prometheus(session: Session, folder: Path, port: int) -> subprocess.Popen | None:
    """Prometheus at a port of this machine, asking every node of the session; None without one.

    Args:
        session: The Ray session.
        folder: For its configuration and data.
        port: Ray's dashboard looks for it at 9090.
    """
    binary = shutil.which("prometheus")
    if binary is None:
        return None
    _require_free(port, "--prometheus-port")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": "5s", "scrape_timeout": "4s"},
        "scrape_configs": [
            {"job_name": "ray", "file_sd_configs": [{"files": [str(session.targets)]}]}
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return _start(
        [
            binary,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        log=folder / "prometheus.log",
        ready=f"http://127.0.0.1:{port}/-/ready",
    )


def start_grafana(session: Session, folder: Path, port: int) -> subprocess.Popen | None:
    """Grafana with Ray's dashboards and raypo's; None where it is not installed."""
    binary = shutil.which("grafana") or shutil.which("grafana-server")
    if binary is None or not session.grafana.exists():
        return None
    _require_free(port, "--grafana-port")
    write_dashboard(session.grafana / "dashboards" / "raypo.json")
    folder.mkdir(parents=True, exist_ok=True)
    homes = [Path("/usr/share/grafana"), Path(binary).resolve().parent.parent]
    home = next((each for each in homes if (each / "public").exists()), homes[-1])
    command = [binary, "server"] if Path(binary).name == "grafana" else [binary]
    return _start(
        [
            *command,
            f"--homepath={home}",
            f"--config={session.grafana / 'grafana.ini'}",
            f"cfg:server.http_port={port}",
            "cfg:server.http_addr=127.0.0.1",
            f"cfg:paths.data={folder / 'data'}",
            f"cfg:paths.logs={folder}",
        ],
        log=folder / "grafana.log",
        ready=f"http://127.0.0.1:{port}/api/health",
    )


def write_dashboard(path: Path) -> None:
    """Write the dashboard's JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(grafana_dashboard(), indent=2) + "\n")


def prometheus_url(port: int, titles: Sequence[str] = ()) -> str:
    """Prometheus' own page with raypo's panels; `titles` are those wanted, none means the first."""
    query: dict[str, str] = {}
    wanted = [panel for panel in PANELS if not titles or panel[0] in titles][: len(titles) or 4]
    for number, (_, _, metrics) in enumerate(wanted):
        query |= {
            f"g{number}.expr": " or ".join(expression(metric, "") for metric in metrics),
            f"g{number}.tab": "0",
            f"g{number}.range_input": "15m",
        }
    return f"http://127.0.0.1:{port}/graph?{urlencode(query)}"


def grafana_url(port: int) -> str:
    """raypo's dashboard in Grafana."""
    return f"http://127.0.0.1:{port}/d/{UID}"


def _require_free(port: int, option: str) -> None:
    """A server that is there already would answer in the place of the one to be started.

    Raises:
        ConfigError: something listens at the port.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(
                f"{option} ({port}): another program listens there, and knows nothing of this Ray. "
                f"Stop it, or choose another port."
            )


def _start(command: list[str], *, log: Path, ready: str) -> subprocess.Popen:
    """A process that answers at an address.

    Raises:
        ConfigError: it ended, or did not answer in time; the text names its log.
    """
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(ready, timeout=2):
                return process
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    process.kill()
    process.wait()
    lines = log.read_text(errors="replace").splitlines()
    last = lines[-1] if lines else "it said nothing"
    raise ConfigError(
        f"{Path(command[0]).name}: it does not answer at {ready} ({last}). "
        f"Choose another port, or look at {log}."
    )
