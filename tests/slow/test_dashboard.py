"""What Ray's own dashboard and Prometheus show of a run, each as it is; skipped without them."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote

import pytest

from raypo.cluster.actors import start_named
from raypo.cluster.connect import dashboard_token, dashboard_url
from raypo.config import LoggingSection
from raypo.deployment.gauges import export_gauges
from raypo.storage.run_files import RunFiles
from raypo.tracking.grafana import PHASES, REPLICAS, ROWS, expression, grafana_dashboard
from raypo.tracking.sinks import Sinks
from tests.integration.browser import CHROMIUM, DRIVER, chromium

pytestmark = pytest.mark.usefixtures("local_ray")

TIMEOUT_S = 90
PLOTS = {plot.title: plot for plots in ROWS.values() for plot in plots}
METRICS = {name.replace("*", "any"): 0.5 for plot in PLOTS.values() for name in plot.metrics}
OF_REPLICAS = {name: METRICS.pop(name) for name in [*METRICS] if name.startswith(REPLICAS)}
METRICS |= {"time/generate_s": 1.0, "time/update_s": 2.0, "time/step_s": 3.0}
METRICS.pop("step")  # each writes its own


class Engine:
    """A replica as the dashboard sees it."""

    def report(self) -> None:
        section = LoggingSection.model_validate({"tensorboard": False})
        self.sinks = Sinks.open(section, files=RunFiles("", "watched-00007"), config={})
        self.sinks.write(3, METRICS)
        for kind in REPLICAS:
            own = {k.partition("/")[2]: v for k, v in OF_REPLICAS.items() if k.startswith(kind)}
            export_gauges(kind, own.copy, threading.Event())

    def __repr__(self) -> str:
        return "Engine(tiny/policy, started)"


@pytest.fixture(scope="module")
def engine(local_ray: None) -> Any:
    import ray

    actor = start_named(Engine, "raypo:watched:engine:0", options={"num_cpus": 0}, kwargs={})
    ray.get(actor.report.remote())
    return actor


@pytest.fixture(scope="module")
def prometheus(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import ray

    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    context: Any = ray.init(ignore_reinit_error=True)
    session = context.address_info["session_dir"]  # where it is
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "raypo.cli", "monitor", "--session", session]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (started,) = (line.split() for line in told.splitlines() if line.startswith("  prometheus "))
    data = f"--storage.tsdb.path={tmp_path_factory.mktemp('prometheus')}"
    process = subprocess.Popen([*started, data, f"--web.listen-address=127.0.0.1:{port}"])
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


def ask(prometheus: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?query={quote(query)}") as answer:
        return json.load(answer)["data"]["result"]


def is_told(prometheus: str, metric: str) -> bool:
    """Whether Prometheus is up and has asked Ray."""
    try:
        return bool(ask(prometheus, expression(metric, "")))
    except URLError:
        return False


def test_every_panel_finds_its_metrics_in_prometheus(prometheus: str):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_told(prometheus, "step") and time.monotonic() < deadline:
        time.sleep(1)
    for panel in grafana_dashboard()["panels"]:
        known = ["step", *METRICS, *OF_REPLICAS]
        expected = len(PLOTS[panel["title"]].lines(known)) if "targets" in panel else 0
        found = []
        for target in panel.get("targets", ()):
            found += ask(prometheus, target["expr"].replace("$run", "watched.*"))
            assert "$run" in target["expr"]
            assert ask(prometheus, target["expr"].replace("$run", "no such run")) == []
        assert len(found) == expected - (panel["title"] == PHASES), panel["title"]
        labels = [line["metric"] for line in found]
        assert all(
            "raypo:watched:engine:0" in each.values() or each["trial"] == "00007" for each in labels
        )


def test_the_actors_page_asks_for_the_token_and_shows_name_and_state(engine: Any, tmp_path: Path):
    pytest.importorskip("selenium.webdriver")
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    with chromium(tmp_path) as browser:
        wait = WebDriverWait(browser, TIMEOUT_S)
        browser.get(f"{dashboard_url()}/#/actors")
        token = dashboard_token()
        if token:
            field = wait.until(
                lambda b: b.find_element(By.CSS_SELECTOR, "[role=dialog] input[type=password]")
            )
            field.send_keys(token)
            browser.find_element(By.XPATH, "//button[contains(., 'ubmit')]").click()
        wait.until(lambda b: "raypo:watched:engine:0" in b.find_element(By.TAG_NAME, "body").text)
        assert "Engine(tiny/policy, started)" in browser.find_element(By.TAG_NAME, "body").text
