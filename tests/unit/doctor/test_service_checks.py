"""Services that answer, refuse, are unreachable or hang: real local sockets, no internet."""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from raypo.config import JudgeSection, PPOConfig
from raypo.doctor import service_checks
from raypo.doctor.result import run_checks
from raypo.doctor.service_checks import hub, judge_server, reward_server
from tests.unit.rewards.scripted_server import served

KEY = "secret-5391"


@contextmanager
def serving(answer: Callable[[str, str], tuple[int, Any]]) -> Iterator[str]:
    """Serve what `answer(path, Authorization)` returns: status and JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answer(self.path, self.headers.get("Authorization", ""))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Error-Code", content.get("code", ""))  # of the hub
            self.end_headers()
            self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, format: str, *_: Any) -> None:
            pass

    with served(Handler) as url:
        yield url


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a server that accepts connections and never answers."""
    monkeypatch.setattr(service_checks, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def unused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_reward_server():
    for status in (405, 501):  # it answers to POST alone
        with serving(lambda path, key, status=status: (status, {})) as url:
            assert reward_server(f"{url}/score").status == "ok"
            judge = JudgeSection(url=(url,), model="judge", template="{response}")
            assert judge_server(url, judge).status == "ok"
    with serving(lambda path, key: (503, {})) as url:
        assert reward_server(url).found == f"{url}: status 503"
    result = reward_server(unused())
    assert result.status == "fault"
    assert "ConnectError" in result.found


def test_a_server_that_never_answers(silent: str):
    result = reward_server(silent)
    assert (result.status, result.found) == ("fault", f"{silent}: no answer in 0.5 s")
    judge = JudgeSection(url=(silent,), model="judge", template="{response}")
    assert judge_server(silent, judge).status == "fault"


def models(path: str, key: str) -> tuple[int, Any]:
    if path != "/v1/models":
        return 404, {}
    return (200, {"data": [{"id": "big"}]}) if key == f"Bearer {KEY}" else (401, {})


def test_a_judge_is_asked_for_its_models_with_the_key(monkeypatch: pytest.MonkeyPatch):
    judge = JudgeSection(
        url=("http://x/v1",), model="big", template="{response}", api_key_variable="THE_KEY"
    )
    with serving(models) as url:
        monkeypatch.delenv("THE_KEY", raising=False)
        unset = judge_server(f"{url}/v1", judge)
        monkeypatch.setenv("THE_KEY", "wrong")
        refused = judge_server(f"{url}/v1", judge)
        monkeypatch.setenv("THE_KEY", KEY)
        accepted = judge_server(f"{url}/v1/", judge)
        other = judge_server(f"{url}/v1", judge.model_copy(update={"model": "small"}))
    assert (unset.status, unset.found) == ("fault", "status 401: THE_KEY is not set")
    assert (refused.status, refused.found) == ("fault", "status 401: THE_KEY is refused")
    assert accepted.status == "ok"
    assert (other.status, other.found) == ("warning", "it serves big, not small")
    assert KEY not in "".join(map(str, (unset, refused, accepted, other)))


def hub_answer(path: str, key: str) -> tuple[int, Any]:
    if key not in ("", f"Bearer {KEY}"):
        return 401, {"error": "Invalid credentials"}
    if path == "/api/whoami-v2":
        return 200, {"name": "somebody"}
    if path.startswith("/api/models/org/gated"):
        return 403, {"code": "GatedRepo"}
    is_open = path.startswith("/api/models/org/open")
    return (200, {}) if is_open else (404, {"code": "RepoNotFound"})


def test_the_hub(monkeypatch: pytest.MonkeyPatch):
    with serving(hub_answer) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        nobody = hub([])
        monkeypatch.setenv("HF_TOKEN", KEY)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: KEY)
        known, missing = hub(["org/open"]), hub(["org/open", "org/missing"])
        gated = hub(["org/gated"])
        with monkeypatch.context() as patched:
            patched.setattr(service_checks, "cached_folder", {"org/gated": "folder"}.get)
            cached, other = hub(["org/gated"]), hub(["org/gated", "org/missing"])
        monkeypatch.setattr("huggingface_hub.get_token", lambda: "wrong")
        monkeypatch.setenv("HF_TOKEN", "wrong")
        wrong = hub([])
        with monkeypatch.context() as patched:
            patched.setattr(service_checks, "cached_folder", lambda model: "folder")
            wrong_but_cached = hub(["org/open"])
            wrong_for_data = hub(["org/open"], has_data=True)
    away = hub([])
    assert (nobody.status, nobody.found) == (
        "ok",
        f"{url}: no token, so only public repositories",
    )
    assert (known.status, known.found) == ("ok", f"{url}: logged in as somebody")
    assert missing.status == "fault"
    assert missing.found == "org/missing: not found; logged in as somebody"
    assert (gated.status, gated.found.split(";")[0]) == ("fault", "org/gated: gated")
    assert (cached.status, "in the cache" in cached.meaning) == ("warning", True)
    assert (other.status, other.found.split(":")[0]) == ("fault", "org/missing")
    assert (wrong_but_cached.status, wrong_for_data.status) == ("warning", "fault")
    assert wrong.status == "fault"
    assert "refuses the token (status 401)" in wrong.found
    assert (away.status, "does not answer" in away.found) == ("warning", True)
    assert KEY not in "".join(map(str, (nobody, known, missing, gated, wrong, away)))


def test_only_the_services_of_the_config_are_checked(tmp_path: Path):
    def names(**sections: Any) -> list[str]:
        values: dict[str, Any] = {
            "name": "run",
            "model": {"policy": str(tmp_path)},
            "data": {"prompts": "rows.jsonl"},
            "reward": {"function": "exact"},
        }
        config = PPOConfig.parse(values | sections)
        return [check.name for check in service_checks.service_checks(config)]

    assert names() == []
    assert names(model={"policy": "org/open"}) == ["Hugging Face hub"]
    assert names(data={"prompts": "openai/gsm8k"}) == ["Hugging Face hub"]
    assert names(reward={"url": "http://127.0.0.1:1/score"}) == [
        "reward server http://127.0.0.1:1/score"
    ]
    judge = {"url": "http://127.0.0.1:1/v1", "model": "big", "template": "{response}"}
    assert names(reward={"judge": judge}) == ["judge http://127.0.0.1:1/v1"]
    assert names(logging={"wandb": {}, "mlflow": {}}) == ["Weights & Biases", "MLflow"]


def test_trackers_without_a_server_are_not_asked(tmp_path: Path):
    values = {
        "name": "run",
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": "rows.jsonl"},
        "reward": {"function": "exact"},
        "logging": {
            "wandb": {"mode": "offline"},
            "mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/a.db"},
        },
    }
    results = run_checks(service_checks.service_checks(PPOConfig.parse(values)))
    assert [result.status for result in results] == ["skipped", "skipped"]
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_is_not_logged_in_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    result = service_checks.wandb()
    assert result.status == "fault"
    assert "wandb login" in result.remedy
