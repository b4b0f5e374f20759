"""When each worker was in which phase and each replica answered what, as a trace to look at.

Every worker appends a line a step to `timeline/worker_<rank>.jsonl`:
`{"step": 1, "spans": [[track, name, begin, end], ...]}`, times in seconds since 1970.

`ray timeline` cannot show this: it needs RAY_PROFILING=1 before Ray starts, knows tasks but no
phases, and forgets with the cluster, whereas these files stay and go on when a run is resumed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from raypo.metrics import clock
from raypo.metrics.catalogue import label_of
from raypo.storage.run_files import RunFiles

Span = tuple[str, str, float, float]
"""Track (worker or replica), name, begin, end; seconds since 1970."""

MAX_KEPT = 10_000
"""Spans that a process keeps between two reports; the oldest go first."""

_calls: deque[Span] = deque(maxlen=MAX_KEPT)
_lock = threading.Lock()


def note_call(replica: str, method: str, begin: float, end: float) -> None:
    """Keep that a replica was asked and answered, until the next `write_spans`."""
    with _lock:
        _calls.append((replica, method, begin, end))


def write_spans(
    files: RunFiles,
    rank: int,
    step: int,
    phases: Sequence[clock.Span],
    beside: Sequence[clock.Span] = (),
) -> None:
    """Append a step of this worker: its phases, and the calls that it made meanwhile.

    Args:
        phases: Those of the step.
        beside: Those of rollouts that were collected meanwhile; they have a track of their own.
    """
    with _lock:
        calls = list(_calls)
        _calls.clear()
    tracks = {f"worker {rank}": phases, f"worker {rank} rollouts": beside}
    spans = [(track, label_of(name), *times) for track in tracks for name, *times in tracks[track]]
    files.append_timeline(f"worker_{rank}", {"step": step, "spans": [*spans, *calls]})


def trace(files: RunFiles) -> dict[str, Any]:
    """The run in the Trace Event Format, which Perfetto and chrome://tracing open.

    Each worker and replica has a track; it holds all attempts at a step, for all happened.
    """
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for line in files.timeline():
        for track, name, begin, end in line["spans"]:
            events.append(
                {
                    "name": name,
                    "cat": "phase" if track.startswith("worker ") else "call",
                    "ph": "X",
                    "ts": round(begin * 1e6),
                    "dur": max(round((end - begin) * 1e6), 0),
                    "pid": 1,
                    "tid": tracks.setdefault(track, len(tracks) + 1),
                    "args": {"step": line["step"]},
                }
            )
    events.sort(key=lambda event: event["ts"])
    names = [("process_name", 0, f"raypo {files.name}")]
    names += [("thread_name", number, track) for track, number in tracks.items()]
    heads = [
        {"name": kind, "ph": "M", "pid": 1, "tid": number, "args": {"name": name}}
        for kind, number, name in names
    ]
    return {"traceEvents": heads + events, "displayTimeUnit": "ms"}
