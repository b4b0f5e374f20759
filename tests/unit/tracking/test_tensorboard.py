import math
from typing import Any

from raypo.tracking.sinks import Sinks
from raypo.tracking.tensorboard import TensorBoard


def events(folder):
    """(step, tag, value) of scalars and (step, "SessionLog", status), files in order."""
    from tensorboardX import proto

    messages: Any = proto.event_pb2  # pyright: ignore[reportAttributeAccessIssue]: generated

    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):  # length (8), its checksum (4), record, its checksum (4)
            size = int.from_bytes(content[at : at + 8], "little")
            event = messages.Event.FromString(content[at + 12 : at + 12 + size])
            at += 16 + size
            if event.HasField("session_log"):
                found.append((event.step, "session", event.session_log.status))
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def test_scalars_are_on_disk_after_each_step_and_what_is_not_finite_is_left_out(tmp_path):
    board = Sinks([TensorBoard(tmp_path)])
    board.write(1, {"rollout/score_mean": 0.5, "x": math.nan, "y": math.inf})

    assert events(tmp_path) == [(1, "rollout/score_mean", 0.5)]
    board.close()


def test_a_resumed_run_hides_what_it_does_again(tmp_path):
    board = TensorBoard(tmp_path, first_step=3)
    board.write(3, {"x": 1.0})
    board.close()

    start = 1  # SessionLog.START: TensorBoard drops earlier events of this step and later
    assert events(tmp_path) == [(3, "session", start), (3, "x", 1.0)]
