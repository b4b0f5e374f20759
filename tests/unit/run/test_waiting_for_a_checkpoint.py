"""A worker that waits for a slow storage moves as long as files arrive there."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

from raypo import pending_work
from raypo.pending_work import at_work, moved
from raypo.run import checkpoint_writer
from raypo.run.checkpoint_writer import CheckpointWriter, Staged

MOVES_S = 0.05


def test_waiting_for_a_checkpoint_moves_as_long_as_its_upload_does(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(checkpoint_writer, "LOOK_EVERY_S", 0.02)
    begun, is_stuck, end = threading.Event(), threading.Event(), threading.Event()
    writer = CheckpointWriter(Mock(is_local=False, location="s3://bucket/run"), lambda text: None)

    def upload(checkpoint: Mock, name: str) -> Mock:
        while not end.is_set():
            if not is_stuck.is_set():
                moved()
            begun.set()
            time.sleep(MOVES_S)
        return checkpoint

    @at_work("the checkpoint")
    def save() -> None:
        writer.wait()

    def idle_s() -> float:
        return max(w.idle_s for w in pending_work.pending() if w.name == "the checkpoint")

    monkeypatch.setattr(writer, "_upload", upload)
    complete = writer.begin(3, Staged(tmp_path, None))
    with ThreadPoolExecutor(2) as threads:  # like Ray Train's, without the context of this test
        try:
            threads.submit(complete, Mock(), "checkpoint")
            begun.wait(10.0)
            waiting = threads.submit(save)
            time.sleep(20 * MOVES_S)
            assert idle_s() < 10 * MOVES_S
            is_stuck.set()
            time.sleep(20 * MOVES_S)
            assert idle_s() > 15 * MOVES_S
        finally:
            end.set()
        waiting.result(10.0)
