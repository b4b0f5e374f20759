"""What a worker opens by `reward.function`, `reward.processes` and `reward.url`; no Ray started."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.rewards.scoring import RewardError
from raypo.rollout.collect import refuse_too_many_failures
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from raypo.types import Rollout
from tests.rollouts import plain_rollout
from tests.tiny import tiny_policy

ROLLOUTS = [
    plain_rollout(4, number, prompt="1+1=", response="2" * number, label="2", group_index=number)
    for number in range(1, 7)
]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    tiny_policy(tmp_path / "policy")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1="}) + "\n")
    (tmp_path / "judges.py").write_text(
        "import os\ndef pid(rollouts):\n    return [float(os.getpid())] * len(rollouts)\n"
    )
    return {
        "name": "run",
        "storage_path": str(tmp_path),
        "model": {"policy": str(tmp_path / "policy")},
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "reward": {
            "function": f"{tmp_path}/judges.py:pid",
            "processes": 1,
            "weights": {"function": 0.0, "url": 2.0},
            "request": {"batch_size": 2, "max_attempts": 1},
        },
    }


class Lengths(BaseHTTPRequestHandler):
    """Scores a response by its length; those of five characters are a bad request."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        lengths = [float(len(sample["response"])) for sample in body["samples"]]
        answer = {"error": "no fives"} if 5.0 in lengths else {"scores": lengths}
        data = json.dumps(answer).encode()
        self.send_response(400 if 5.0 in lengths else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *_: Any) -> None:
        pass


def judged(values: dict[str, Any]) -> tuple[PPOConfig, list[Rollout]]:
    """The rollouts as a worker of the run judges them, with a server of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Lengths)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    values["reward"]["url"] = f"http://127.0.0.1:{server.server_port}/score"
    config = PPOConfig.parse(values)
    runtime = Runtime("run", config.storage_path, os.getcwd())
    files = RunFiles(config.storage_path, "run")
    run = Run(config, runtime, Workers(), files, MonitorClient(None))
    try:
        nobody: Any = None
        with run.at_end:
            own = OnlineInputs.load(run).rollouts
            assert own is not None
            return config, own.scorer(config, Services(nobody, {})).score(ROLLOUTS)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_sources_are_kept_apart_and_failures_are_masked_with_their_reason(config):
    parsed, scored = judged(config)

    assert [each.scores_by_source["url"] for each in scored[:4]] == [1.0, 2.0, 3.0, 4.0]
    assert [each.score for each in scored[:4]] == [2.0, 4.0, 6.0, 8.0]
    assert all(np.isnan(each.score) for each in scored[4:])
    (pid,) = {each.scores_by_source["function"] for each in scored}
    assert pid not in (0.0, float(os.getpid()))

    section = parsed.reward.model_copy(update={"max_failed_fraction": 0.34})
    refuse_too_many_failures(scored, section)
    with pytest.raises(RewardError, match=r"2 of 6 rollouts .*status 400: no fives"):
        refuse_too_many_failures(scored, parsed.reward)


def test_a_function_that_fails_on_the_first_rows_ends_the_run_before_a_model_loads(
    config: dict[str, Any], tmp_path: Path
):
    (tmp_path / "judges.py").write_text("def pid(rollouts):\n    raise KeyError('no label')\n")
    with pytest.raises(RewardError, match=r"'no label'.* made up to try the function"):
        judged(config)
