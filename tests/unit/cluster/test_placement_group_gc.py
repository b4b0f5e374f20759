"""Turns to reserve, without Ray."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.cluster import placement_group_gc as group_gc
from raypo.cluster.placement_group_gc import PlacementGroupGC


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Leases that are dead."""
    gone: set[str] = set()
    monkeypatch.setattr(group_gc, "is_alive", lambda lease: lease not in gone)
    monkeypatch.setattr(group_gc, "CHECK_INTERVAL_S", 1e6)  # it looks when it is asked
    return gone


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Groups, in the order in which they were removed."""
    groups: list[str] = []
    monkeypatch.setattr(group_gc, "remove_placement_group", groups.append)
    return groups


def test_one_run_at_a_time_reserves_its_groups(dead: set[str], removed: list[str]):
    gc: Any = PlacementGroupGC()
    assert gc.take_turn("one", "lease of one") is None
    assert gc.take_turn("two", "lease of two") == "one"
    gc.end_turn("two")  # of a run that has gone on without one
    assert gc.take_turn("two", "lease of two") == "one"
    gc.end_turn("one")
    assert gc.take_turn("two", "lease of two") is None
    assert not removed


def test_a_collector_of_one_run_ends_itself_with_what_the_run_held(
    dead: set[str], removed: list[str], monkeypatch: pytest.MonkeyPatch
):
    """It outlives the process that started it, so nobody else would end it."""
    ended: list[str] = []
    context = SimpleNamespace(current_actor="the group collector")
    monkeypatch.setattr(group_gc.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(group_gc.ray, "kill", ended.append)
    monkeypatch.setattr(group_gc, "CHECK_INTERVAL_S", 0.01)
    lease: Any = "the lease of the run"
    gc: Any = PlacementGroupGC(lease)
    gc.hold(lease, "its workers' group")
    time.sleep(0.1)
    assert (removed, ended) == ([], [])
    dead.add(lease)
    deadline = time.monotonic() + 5.0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (removed, ended) == (["its workers' group"], ["the group collector"])


@pytest.mark.parametrize("until", [None, "lease"])
def test_a_failed_removal_is_logged_and_tried_again(
    until: Any,
    dead: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    removed, ended, failures = [], [], [RuntimeError("the GCS restarts")] * 2

    def remove(group: str) -> None:
        if failures:
            raise failures.pop()
        removed.append(group)

    monkeypatch.setattr(group_gc, "remove_placement_group", remove)
    context = SimpleNamespace(current_actor="the group collector")
    monkeypatch.setattr(group_gc.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(group_gc.ray, "kill", ended.append)
    monkeypatch.setattr(group_gc, "CHECK_INTERVAL_S", 0.01)
    gc: Any = PlacementGroupGC(until)
    gc.hold("lease", "its group")
    dead.add("lease")
    deadline = time.monotonic() + 5.0
    while not (ended if until else removed) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert removed == ["its group"]
    assert ended == ["the group collector"] * bool(until)
    assert "the GCS restarts" in caplog.text


def test_a_run_that_dies_in_its_turn_leaves_neither_turn_nor_group(
    dead: set[str], removed: list[str]
):
    gc: Any = PlacementGroupGC()
    assert gc.take_turn("one", "lease of one") is None
    gc.hold("lease of one", "the dedicated group of one")
    gc.hold("lease of two", "what two holds")
    dead.add("lease of one")
    assert gc.take_turn("one", "its second lease") is None
    assert removed == ["the dedicated group of one"]
    assert repr(gc) == "PlacementGroupGC(1 placement groups)"
