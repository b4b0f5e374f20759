"""Trace of a run: the phases of each worker and the calls to each replica over time.

Every worker appends a line per step to `timeline/worker_<rank>.jsonl`:
`{"step": 1, "spans": [[track, name, begin, end], ...]}`, times in seconds since 1970.

`ray timeline` cannot show this: it needs RAY_PROFILING=1 before Ray starts, it shows tasks but no
phases, and it is lost with the cluster. The files of raypo persist, and a resumed run appends to
them.
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
"""Track (worker or replica), name, begin and end, in seconds since 1970."""

MAX_KEPT = 10_000
"""Maximum number of calls buffered until the next `write_spans`. The oldest are dropped first."""

_calls: deque[Span] = deque(maxlen=MAX_KEPT)
_lock = threading.Lock()


def trace_call(replica: str, method: str, begin: float, end: float) -> None:
    """Buffer a completed call to a replica, for the next `write_spans`. Thread-safe."""
    with _lock:
        _calls.append((replica, method, begin, end))


def write_spans(
    files: RunFiles,
    rank: int,
    step: int,
    phases: Sequence[clock.Span],
    beside: Sequence[clock.Span] = (),
) -> None:
    """Append a step of this worker to the timeline: its phases, and the calls since the last step.

    Args:
        files: Files of the run.
        rank: Rank of this worker.
        step: The completed step.
        phases: Phases of the step.
        beside: Phases of the rollouts that were collected concurrently. They get a track of their
            own.
    """
    with _lock:
        calls = list(_calls)
        _calls.clear()
    tracks = {f"worker {rank}": phases, f"worker {rank} rollouts": beside}
    spans = [(track, label_of(name), *times) for track in tracks for name, *times in tracks[track]]
    files.append_timeline(f"worker_{rank}", {"step": step, "spans": [*spans, *calls]})


def trace(files: RunFiles) -> dict[str, Any]:
    """Return the run in the Trace Event Format of Perfetto and chrome://tracing.

    Each worker and replica has a track. All attempts at a step are included.
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
