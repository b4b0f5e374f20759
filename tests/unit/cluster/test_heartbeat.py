"""A heartbeat goes on whatever happens to a beat, and nothing follows the last one."""

import threading
import time
from unittest.mock import Mock

import pytest

from raypo.cluster import heartbeat as module
from raypo.cluster.heartbeat import Beat, heartbeat


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ray, "get_runtime_context", Mock())


def test_a_beat_that_cannot_be_sent_is_followed_by_others():
    sent, monitor = list[Beat](), Mock()
    monitor.beat.remote.side_effect = [OSError("full"), *(None for _ in range(1000))]
    with heartbeat(monitor, 0, 0.05):
        time.sleep(0.5)
    sent = [call.args[0] for call in monitor.beat.remote.call_args_list]
    assert len(sent) > 3
    assert [beat.is_last for beat in sent] == [False] * (len(sent) - 1) + [True]


def test_a_beat_that_is_being_sent_comes_before_the_last_one():
    sent, monitor, is_sending = list[bool](), Mock(), threading.Event()

    def send(beat: Beat) -> None:
        if not beat.is_last:
            is_sending.set()
            time.sleep(0.2)
        sent.append(beat.is_last)

    monitor.beat.remote = send
    with heartbeat(monitor, 0, 0.05):
        is_sending.wait(10.0)
    time.sleep(0.3)
    assert sent[-1]
