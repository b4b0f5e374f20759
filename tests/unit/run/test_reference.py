"""What a reference has said is kept, and no other's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypo.collectives import Workers
from raypo.run import reference
from raypo.run.reference import with_references
from raypo.storage.run_files import RunFiles
from raypo.types import Pair

IDS = [np.asarray(row, np.int32) for row in ([5, 6], [7, 8, 2], [9, 2])]
PAIRS = [Pair(IDS[0], IDS[1], IDS[2]), Pair(IDS[1], IDS[2], IDS[0])]


def test_another_reference_is_asked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    def ask(items: list[Pair], *others: Any) -> list[tuple[float, float]]:
        asked.append(len(items))
        return [(-1.0 * len(asked), -2.0)] * len(items)

    monkeypatch.setattr(reference, "_asked", ask)
    files, nobody = RunFiles(str(tmp_path), "run"), None

    def told(name: str) -> list[tuple[float, float] | None]:
        learner: Any = nobody
        found = with_references(PAIRS, learner, name=name, files=files, workers=Workers())
        return [pair.ref_log_probs for pair in found]

    assert told("one float32") == told("one float32") == [(-1.0, -2.0)] * 2
    assert told("other float32") == [(-2.0, -2.0)] * 2
    assert asked == [2, 2]
