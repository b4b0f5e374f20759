"""What engines tell of themselves, as metrics of a step."""

from typing import Any

import pytest

from raypo.run.service_gauges import EnginesLoad
from raypo.serving.requests import Load, LoadSummary


def told(summary: LoadSummary | None = None, **load: Any) -> tuple[Load, LoadSummary]:
    return Load(**load), summary or LoadSummary()


def test_engines_were_idle_for_what_they_did_not_step(monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 110.0, 112.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    looks = EnginesLoad()

    first = looks.metrics({"a": told(busy_s=5.0, preemptions=1), "b": told(busy_s=7.0)})
    second = looks.metrics(
        {
            "a": told(LoadSummary(1.5, 2.0, 0.0, 0.0, 0.25, 0.5), busy_s=13.0, preemptions=3),
            "b": told(LoadSummary(0.0, 0.0, 3.0, 4.0, 0.5, 0.75), busy_s=9.0),
        }
    )
    started_again = looks.metrics({"a": told(busy_s=1.0), "b": told(busy_s=9.0)})

    assert "perf/engine_idle_s" not in first
    assert "perf/draft_acceptance" not in first
    assert second == {
        "perf/engine_queued": 1.5,
        "perf/engine_queued_max": 2.0,
        "perf/engine_running": 3.0,
        "perf/engine_running_max": 4.0,
        "perf/engine_kv_cache": 0.5,
        "perf/engine_kv_cache_max": 0.75,
        "perf/engine_preemptions": 2.0,
        "perf/engine_idle_s": 5.0,  # of 10 s, one was busy for 8 and the other for 2
    }
    assert started_again["perf/engine_preemptions"] == 0.0
    assert started_again["perf/engine_idle_s"] == 2.0


def test_the_share_of_drafted_tokens_that_were_accepted_since_the_last_call():
    looks = EnginesLoad()
    first = looks.metrics({"a": told(drafted=100, accepted=50), "b": told()})
    second = looks.metrics({"a": told(drafted=140, accepted=60), "b": told(drafted=10)})
    started_again = looks.metrics({"a": told(drafted=30, accepted=9), "b": told(drafted=20)})
    looks = [look["perf/draft_acceptance"] for look in (first, second, started_again)]
    assert looks == pytest.approx([0.5, 0.2, 9 / 40])


def test_the_slowest_engine_is_known_by_its_seconds_per_step():
    load = EnginesLoad()

    def after(*of_engines: tuple[float, int]) -> dict[str, float]:
        return load.metrics(
            {
                f"engine:{number}": (Load(busy_s=busy_s, steps=steps), LoadSummary())
                for number, (busy_s, steps) in enumerate(of_engines)
            }
        )

    assert "perf/slowest_engine" not in after((1.0, 10), (1.0, 10), (1.0, 10))
    metrics = after((2.0, 20), (4.0, 20), (3.0, 30))  # 0.1, 0.3 and 0.1 s per step
    assert metrics["perf/slowest_engine"] == 1.0
    assert metrics["perf/slowest_engine_ratio"] == pytest.approx(3.0)
    assert "perf/slowest_engine" not in after((3.0, 30), (0.5, 5), (4.0, 40)), "one has restarted"
