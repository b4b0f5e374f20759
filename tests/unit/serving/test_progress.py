"""Means, peaks and idle times of a load, and whether somebody gets on."""

import pytest

from raypo.serving.progress import Meter, Progress
from raypo.serving.requests import LoadSummary


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which tests move on; seconds since 1970 are 1000 more."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: 1000.0 + now[0])
    return now


def test_means_are_over_the_time_and_peaks_of_it_since_they_were_last_taken(clock: list[float]):
    meter = Meter()
    clock[0] += 2.0
    meter.note(queued=4, running=1, kv_cache=0.5)
    clock[0] += 6.0
    meter.note(queued=0, running=3, kv_cache=0.25)
    clock[0] += 2.0
    assert meter.take() == LoadSummary(2.4, 4, 1.2, 3, 0.35, 0.5)
    clock[0] += 5.0
    assert meter.take() == LoadSummary(0.0, 0, 3.0, 3, 0.25, 0.25)
    assert meter.take() == LoadSummary(0.0, 0, 3.0, 3, 0.25, 0.25), "of no time: as it is now"


def test_idle_times_are_told_once_and_short_ones_never(clock: list[float]):
    meter = Meter()
    clock[0] += 2.0
    meter.note_idle(2.0)
    meter.note_idle(0.01)
    assert meter.take().idle == ((1100.0, 1102.0),)
    assert meter.take().idle == ()


def test_whoever_is_at_work_gets_on_step_by_step(clock: list[float]):
    progress = Progress()
    clock[0] += 50.0
    assert progress.stalled_s() == 0.0
    with progress.at_work():
        clock[0] += 3.0
        assert progress.stalled_s() == 3.0
        progress.step()
        clock[0] += 2.0
        assert progress.stalled_s() == 2.0
    clock[0] += 50.0
    assert progress.stalled_s() == 0.0
