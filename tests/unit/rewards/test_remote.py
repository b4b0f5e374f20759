"""Client and server over real sockets: failing, slow, dying and lying servers."""

import gzip
import json
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from email.utils import formatdate
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from tenacity import AsyncRetrying, RetryCallState

from raypo.rewards.remote import JsonServers, RemoteReward, _Retryable, _seconds
from raypo.rewards.scoring import RewardError, first_reason, score
from raypo.rewards.server import make_app
from raypo.rewards.wire import TOKEN_VARIABLE, WireError, from_answer, from_request, to_request
from raypo.types import Rollout
from tests.unit.rewards.scripted_server import scripted


def rollout(number: int) -> Rollout:
    return Rollout(
        prompt=f"{number}+0=",
        response=str(number),
        prompt_ids=np.arange(4, dtype=np.int32),
        response_ids=np.array([number], dtype=np.int32),
        log_probs=np.zeros(1, np.float32),
        response_mask=np.ones(1, bool),
        label={"answer": number},
        prompt_index=number,
        sample_index=number % 2,
        finish_reason="stop",
        weight_version=3,
    )


ROLLOUTS = [rollout(number) for number in range(10)]
EXPECTED = [float(number) for number in range(10)]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def as_number(rollouts: list[Rollout]) -> list[float]:
    return [float(r.response) for r in rollouts]


@pytest.mark.parametrize(
    ("label", "sent"),
    [
        (Decimal("1.50"), "1.50"),
        (date(2026, 11, 26), "2026-11-26"),
        (datetime(2026, 11, 26, 8, 30), "2026-11-26T08:30:00"),
        ([np.float32(0.5), {"a": np.arange(2)}], [0.5, {"a": [0, 1]}]),
        (np.int64(3), 3),
        (True, True),
        (None, None),
    ],
)
def test_labels_of_parquet_are_sent_as_json_has_them(label, sent):
    body = json.dumps(to_request([replace(ROLLOUTS[0], label=label)]), allow_nan=False)
    assert from_request(body.encode())[0].label == sent


@pytest.mark.parametrize("label", [b"1", {1: 2}, {"a": math.nan}, [{1}], object(), "\ud83d"])
def test_a_label_that_json_cannot_hold_is_an_error_of_its_row(label):
    ask = client("http://127.0.0.1:9")  # nobody is asked
    wrong = replace(ROLLOUTS[7], label=label)
    with pytest.raises(RewardError, match=r"^data\.label_key: the label of row 7 has .*JSON"):
        score(ask, [wrong])


def test_a_score_that_no_float_can_hold_is_the_servers_mistake():
    with pytest.raises(WireError, match=r"a score must be at most 3\.4e\+38"):
        from_answer({"scores": [10**400]}, 1)


def client(*urls: str, **changes: Any) -> RemoteReward:
    settings: dict[str, Any] = {"batch_size": 3, "max_concurrent": 4, "timeout_s": 5.0}
    settings |= {"max_attempts": 3, "backoff_s": (0.01, 0.05)}
    settings |= {"token": os.environ.get(TOKEN_VARIABLE)}
    settings |= changes
    batch_size = settings.pop("batch_size")
    return RemoteReward(JsonServers(urls, **settings), batch_size=batch_size)


@contextmanager
def served(function: Callable[..., Any], **options: Any) -> Iterator[str]:
    """raypo's own server in a thread."""
    settings: dict[str, Any] = {"token": None} | options
    app = make_app(function, name="test", **settings)
    config = uvicorn.Config(app, port=0, log_level="critical", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/score"
    finally:
        server.should_exit = True
        thread.join()


def numbers(body: dict[str, Any]) -> dict[str, Any]:
    return {"scores": [float(sample["response"]) for sample in body["samples"]]}


def scores_of(reward: RemoteReward) -> list[float]:
    return score(reward, ROLLOUTS)


def reason_of(reward: RemoteReward) -> str:
    """Why no rollout has a score."""
    scores = score(reward, ROLLOUTS)
    assert np.isnan(scores).all()
    return first_reason(scores) or ""


def test_scores_come_back_in_order_batched():
    sizes = []

    def function(rollouts: list[Rollout]) -> list[float]:
        sizes.append(len(rollouts))
        return as_number(rollouts)

    with served(function) as url:
        assert scores_of(client(url)) == EXPECTED
    assert sorted(sizes) == [1, 3, 3, 3]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch, host):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with scripted(lambda body, _: (200, numbers(body))) as (url, _):
        assert scores_of(client(url.replace("127.0.0.1", host))) == EXPECTED


def test_a_server_elsewhere_is_asked_by_the_proxy(monkeypatch):
    with scripted(lambda body, _: (200, numbers(body))) as (url, _):
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, url.removesuffix("/score"))
        assert scores_of(client("http://rewards.example/score")) == EXPECTED


def test_the_server_sees_what_the_run_has():
    seen: list[Rollout] = []

    def function(rollouts: list[Rollout]) -> list[float]:
        seen.extend(rollouts)
        return as_number(rollouts)

    with served(function) as url:
        scores_of(client(url, max_concurrent=1))
    for mine, theirs in zip(ROLLOUTS, seen, strict=True):
        for name in ("prompt", "response", "label", "prompt_index", "sample_index"):
            assert getattr(mine, name) == getattr(theirs, name)
        np.testing.assert_array_equal(mine.prompt_ids, theirs.prompt_ids)
        np.testing.assert_array_equal(mine.response_ids, theirs.response_ids)


def test_samples_without_a_score_stay_single_failures():
    def function(rollouts: list[Rollout]) -> list[float | None]:
        return [None if r.response == "4" else 1.0 for r in rollouts]

    with served(function) as url:
        scores = scores_of(client(url))
    assert [place for place, value in enumerate(scores) if np.isnan(value)] == [4]


def test_a_server_that_fails_at_first_is_asked_again():
    with scripted(lambda body, number: (503, {}) if number < 5 else (200, numbers(body))) as (
        url,
        _,
    ):
        assert scores_of(client(url, max_attempts=5)) == EXPECTED


@pytest.mark.parametrize("header", [{}, {"Retry-After": "0.4"}], ids=["backoff", "as_it_says"])
def test_the_next_attempt_waits(header: dict[str, str]):
    """At least as long as the server says, within the longest wait; else a random growing time."""
    error = _Retryable("busy")
    error.retry_after_s = _seconds(header.get("Retry-After"))
    limits = {"max_concurrent": 1, "timeout_s": 1.0, "max_attempts": 9}
    servers = JsonServers(["http://127.0.0.1:1"], token=None, backoff_s=(0.1, 0.5), **limits)
    waits: dict[int, list[float]] = {}
    for attempt in (1, 8):
        state = RetryCallState(AsyncRetrying(), None, (), {})
        state.attempt_number = attempt
        state.set_exception((_Retryable, error, None))
        waits[attempt] = [servers._wait(state) for _ in range(200)]
    if header:
        assert min(waits[1] + waits[8]) >= 0.4
    else:
        assert 0.0 < max(waits[1]) <= 0.1 < max(waits[8])
    assert max(waits[8]) <= 0.5


def test_a_server_says_in_seconds_or_with_a_date_when_to_come_again():
    assert _seconds("7") == 7.0
    assert 55.0 < _seconds(formatdate(time.time() + 60, usegmt=True)) <= 60.0
    assert _seconds("soon") == _seconds(None) == 0.0


def test_a_server_that_hangs_up_is_asked_again():
    with scripted(lambda body, number: (0, {}) if number < 3 else (200, numbers(body))) as (url, _):
        assert scores_of(client(url)) == EXPECTED


def test_the_error_of_a_server_that_stays_broken_is_the_reason():
    def function(rollouts: list[Rollout]) -> list[float]:
        raise KeyError("no such label")

    with served(function) as url:
        text = reason_of(client(url))
    assert f"{url}: status 500" in text
    assert "raised KeyError: 'no such label'" in text


def test_batches_that_fail_are_failed_samples():
    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        bad = any(sample["response"] == "4" for sample in body["samples"])
        return (500, {"error": "cannot judge 4"}) if bad else (200, numbers(body))

    with scripted(answer) as (url, _):
        scores = scores_of(client(url))
    assert [place for place, value in enumerate(scores) if np.isnan(value)] == [3, 4, 5]
    assert "cannot judge 4" in (first_reason(scores) or "")


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_another_attempt_cannot_heal_is_asked_once(status: int):
    with scripted(lambda body, number: (status, {"error": "no"})) as (url, requests):
        assert f"status {status}: no" in reason_of(client(url, batch_size=100))
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"scores": [1.0]}, "it is 1 scores"),
        ({"score": 1}, "it is {'score': 1}"),
        ({"scores": ["a"] * 10}, "one is 'a'"),
        (b"<html>", "Expecting value"),
        (b"[" * 10**5, "nested too deeply"),
        (b'{"scores": [' + b" " * (65 << 20), "its answer is larger than 67108864 bytes"),
    ],
)
def test_what_is_no_answer_is_told(content: Any, reason: str):
    with scripted(lambda body, number: (200, content)) as (url, _):
        assert reason in reason_of(client(url, batch_size=100))


def test_a_small_answer_that_decompresses_to_a_large_one_is_not_held():
    bomb = gzip.compress(b" " * (1 << 30), 1)  # 1 GB of 5 MB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with scripted(lambda body, number: (200, bomb), {"Content-Encoding": "gzip"}) as (url, _):
        assert "is larger than" in reason_of(client(url, batch_size=100))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 400_000  # kB


def test_the_reason_of_a_failure_may_be_nested_too_deeply():
    with scripted(lambda body, number: (400, b"[" * 10**5)) as (url, _):
        assert "status 400: [[[" in reason_of(client(url, batch_size=100))


def test_a_slow_server_times_out_and_the_other_one_answers():
    release = threading.Event()

    def slow(body: dict[str, Any], number: int) -> tuple[int, Any]:
        release.wait(10)
        return 200, numbers(body)

    with scripted(slow) as (stuck, _), served(as_number) as good:
        started = time.monotonic()
        assert scores_of(client(stuck, good, timeout_s=0.5)) == EXPECTED
        assert time.monotonic() - started < 8
        release.set()


def test_requests_go_to_all_servers():
    counts = []
    with (
        scripted(lambda body, number: (200, numbers(body))) as (one, first),
        scripted(lambda body, number: (200, numbers(body))) as (two, second),
    ):
        assert scores_of(client(one, two, batch_size=1)) == EXPECTED
        counts = [len(first), len(second)]
    assert sum(counts) == 10
    assert min(counts) >= 1  # how many each gets is up to the clock


def test_no_more_requests_are_under_way_than_allowed():
    now, most, lock = [0], [0], threading.Lock()

    def answer(body: dict[str, Any], number: int) -> tuple[int, Any]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return 200, numbers(body)

    with scripted(answer) as (url, _):
        assert scores_of(client(url, batch_size=1, max_concurrent=2)) == EXPECTED
    assert most[0] == 2


def test_only_the_right_token_opens_the_server(monkeypatch: pytest.MonkeyPatch):
    with served(as_number, token="secret") as url:
        assert "status 401: the token is missing or wrong" in reason_of(client(url))
        monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
        assert "status 401" in reason_of(client(url))
        monkeypatch.setenv(TOKEN_VARIABLE, "secret")
        assert scores_of(client(url)) == EXPECTED


def test_a_redirect_is_not_followed_so_the_token_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with (
        scripted(lambda body, number: (200, numbers(body))) as (elsewhere, followed),
        scripted(lambda body, number: (307, {}), headers={"Location": elsewhere}) as (url, _),
    ):
        assert "status 307" in reason_of(client(url))
    assert followed == []


def test_a_page_in_a_browser_cannot_use_a_server_without_a_token():
    body = to_request(ROLLOUTS[:1])
    headers = {"Origin": "https://elsewhere.example"}
    with served(as_number) as url:
        assert httpx.post(url, json=body, headers=headers).status_code == 403
        assert httpx.post(url, json=body).status_code == 200
    with served(as_number, token="secret") as url:
        headers["Authorization"] = "Bearer secret"
        assert httpx.post(url, json=body, headers=headers).status_code == 200


def test_a_full_server_says_come_again():
    entered, release = threading.Event(), threading.Event()

    def slow(rollouts: list[Rollout]) -> list[float]:
        entered.set()
        release.wait(10)
        return as_number(rollouts)

    with served(slow, max_queued=0) as url:
        body = to_request(ROLLOUTS[:1])
        first = threading.Thread(target=httpx.post, args=(url,), kwargs={"json": body})
        first.start()
        assert entered.wait(10)
        refused = httpx.post(url, json=body)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"] == "1"
        release.set()
        first.join()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "the body: Invalid JSON"),
        (b"[]", "the body: Input should be an object"),
        (b'{"samples": [{"prompt": 1}]}', "samples.0.prompt: Input should be a valid string"),
        (
            b'{"samples": [{"prompt": "", "response": "", "prompt_ids": ["a"]}]}',
            "samples.0.prompt_ids.0: Input should be a valid integer",
        ),
    ],
)
def test_what_is_no_request_is_refused(content: bytes, reason: str):
    with served(as_number) as url:
        refused = httpx.post(url, content=content)
    assert refused.status_code == 422
    assert reason in refused.json()["error"]


def test_health_does_not_name_what_is_served_to_those_without_the_token():
    with served(as_number, token="secret") as url:
        url = url.replace("/score", "/health")
        assert httpx.get(url).json() == {"status": "ok"}
        known = httpx.get(url, headers={"Authorization": "Bearer secret"})
        assert known.json() == {"status": "ok", "name": "test"}


def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raypo.http_server.MAX_BODY_BYTES", 10**5)
    with served(as_number) as url:
        refused = httpx.post(url, content=b" " * (10**5 + 1))
    assert refused.status_code == 413
    assert refused.json()["error"] == "the body of a request has at most 100000 bytes"


def test_requests_whose_bodies_are_still_coming_count_as_waiting():
    entered, release = threading.Event(), threading.Event()

    def slow_body() -> Iterator[bytes]:
        yield b"{"
        entered.set()
        release.wait(10)
        yield b"}"

    with served(as_number, max_queued=0) as url:
        first = threading.Thread(target=httpx.post, args=(url,), kwargs={"content": slow_body()})
        first.start()
        assert entered.wait(10)
        deadline = time.monotonic() + 10
        while httpx.post(url, json=to_request(ROLLOUTS[:1])).status_code != 503:
            assert time.monotonic() < deadline
        release.set()
        first.join()


def test_prompt_and_response_are_enough_for_a_request():
    (made,) = from_request(b'{"samples": [{"prompt": "2+2=", "response": "4"}]}')
    assert (made.prompt, made.response, made.label, made.finish_reason) == (
        "2+2=",
        "4",
        None,
        "stop",
    )


class Judge:
    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return as_number(rollouts)


@pytest.mark.parametrize("judge", [Judge(), partial(as_number), Judge().__call__])
def test_whatever_can_be_called_is_served(judge: Any):
    with served(judge) as url:
        assert score(client(url), ROLLOUTS) == EXPECTED
