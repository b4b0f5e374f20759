"""What engines tell of themselves, as metrics of a step."""

import pytest

from raypo.run.engines_load import EnginesLoad
from raypo.serving.requests import Load


def test_engines_were_idle_for_what_they_did_not_step(monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 110.0, 112.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    looks = EnginesLoad()

    first = looks.figures([Load(busy_s=5.0, preemptions=1), Load(busy_s=7.0)])
    second = looks.figures(
        [
            Load(busy_s=13.0, preemptions=3, queued=2, kv_cache_use=0.5),
            Load(busy_s=9.0, running=4, kv_cache_use=0.75),
        ]
    )
    started_again = looks.figures([Load(busy_s=1.0), Load(busy_s=9.0)])

    assert "perf/engine_idle_s" not in first
    assert second == {
        "perf/engine_queued": 2.0,
        "perf/engine_running": 4.0,
        "perf/engine_kv_cache": 0.75,
        "perf/engine_preemptions": 2.0,
        "perf/engine_idle_s": 5.0,  # of 10 s, one was busy for 8 and the other for 2
    }
    assert started_again["perf/engine_preemptions"] == 0.0
    assert started_again["perf/engine_idle_s"] == 2.0
