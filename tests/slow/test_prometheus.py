"""Ray's metrics endpoint tells a run's gauges for as long as the run lives."""

import time
import urllib.request
from typing import Any

import pytest

from raypo.config import LoggingSection
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import Sinks
from tests.integration.test_sinks import OFF

FORGOTTEN_AFTER_S = 40.0
"""By then Ray no longer tells a gauge that was set once."""


@pytest.mark.usefixtures("local_ray")
def test_prometheus_finds_the_metrics_of_a_run_under_stable_names():
    import ray

    class Worker:
        def __init__(self) -> None:
            section = LoggingSection.model_validate(OFF | {"prometheus": True})
            self.sinks = Sinks.open(section, files=RunFiles("", "kl-00012"), config={})

        def write(self) -> None:
            self.sinks.write(3, {"rollout/score_mean": 0.5})

    worker: Any = ray.remote(num_cpus=0)(Worker).remote()
    ray.get(worker.write.remote())
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"

    def exported() -> list[str]:
        with urllib.request.urlopen(address) as answer:
            lines = answer.read().decode().splitlines()
        own = [line for line in lines if 'run="kl-00012"' in line]  # other tests' runs are there
        return [line for line in own if line.startswith("ray_raypo_rollout_score_mean{")]

    deadline = time.monotonic() + 60
    while not exported() and time.monotonic() < deadline:
        time.sleep(1)
    time.sleep(FORGOTTEN_AFTER_S)
    (line,) = exported()
    assert 'trial="00012"' in line
    assert line.endswith(" 0.5")
