"""The driver's end at a signal, in a process of its own; a socket that listens is Ray's head."""

import subprocess
import sys
import time

import pytest

SCRIPT = """
import os, signal, socket, sys, time
from types import SimpleNamespace
import ray
from raypo.trainer import watch

head = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % head.getsockname()[1]
ray.get_runtime_context = lambda: SimpleNamespace(gcs_address=address)
watch.POLL_S, watch.GRACE_S = 0.1, 0.5
try:
    with watch.stop_on_signal(lambda: print("asked", flush=True)):
        os.kill(os.getpid(), signal.SIGTERM)
        {after}
        time.sleep({step_s})
    head.close()
    time.sleep(1.0)
    print("done", flush=True)
finally:
    print("files written", flush=True)
    {at_end}
"""


@pytest.mark.parametrize(
    ("after", "step_s", "at_end", "said", "status"),
    [
        # The head lives: the step ends, and Ray's own end later is none of the watcher's business.
        ("", 0.5, "", ["asked", "done", "files written"], 0),
        # The head is gone: the step is given up, and what waits for Ray at the end as well.
        ("head.close()", 60.0, "time.sleep(60.0)", ["asked", "Ray has ended too", "files"], 130),
    ],
)
def test_a_run_ends_in_seconds_with_or_without_ray(
    after: str, step_s: float, at_end: str, said: list[str], status: int
):
    script = SCRIPT.format(after=after, step_s=step_s, at_end=at_end)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=50
    )
    assert done.returncode == status, done.stderr
    assert time.monotonic() - began < 45.0  # most of it is the import of Ray
    lines = done.stdout.splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(words) for line, words in zip(lines, said, strict=True))
