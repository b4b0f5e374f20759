"""The server of a live page: who may read it, and what it sends when the run goes on."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from raypo.cli.monitor import page_source
from raypo.config import ConfigError
from raypo.report.live_page import make_app
from raypo.storage.run_files import RunFiles
from tests.recorded_run import metrics, write_run

TOKEN = "a-token"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, steps=3, with_rollouts=False)


@pytest.fixture
def client(run: Path) -> TestClient:
    make_page, version = page_source([str(run)])
    return TestClient(make_app(make_page, version, token=TOKEN))


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("/", {}, 401),
        ("/?token=", {}, 401),
        ("/?token=another", {}, 401),
        ("/", {"Authorization": "Bearer another"}, 401),
        ("/", {"Authorization": f"Bearer {TOKEN}"}, 200),
        (f"/?token={TOKEN}", {}, 200),
        (f"/metrics.jsonl?token={TOKEN}", {}, 404),
    ],
)
def test_only_who_has_the_token_reads_the_page(
    client: TestClient, address: str, headers: dict[str, str], status: int
):
    answer = client.get(address, headers=headers)
    assert answer.status_code == status
    assert ("Score" in answer.text) == (status == 200)


def test_nothing_can_be_changed_through_it(client: TestClient):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, f"/?token={TOKEN}").status_code == 405


def test_another_version_comes_only_after_another_step(client: TestClient, run: Path):
    def version(page: str) -> str:
        return page.partition('data-version="')[2].partition('"')[0]

    first = client.get("/", params={"token": TOKEN}).text
    assert "<td>step 3 of 12</td>" in first
    known = {"If-None-Match": version(first)}
    assert client.get("/", params={"token": TOKEN}, headers=known).status_code == 304
    RunFiles.at(str(run)).append_metrics(4, metrics(4))
    second = client.get("/", params={"token": TOKEN}, headers=known)
    assert second.status_code == 200
    assert "<td>step 4 of 12</td>" in second.text
    assert version(second.text) != version(first)
    assert len(second.text) < len(first) / 10, "plotly.js comes once"
    assert second.headers["Cache-Control"] == "no-store"


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    make_page, _ = page_source([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="there is no run"):
        make_page()
