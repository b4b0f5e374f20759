"""Log-probs of a reference are computed once, and never used for another reference."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from raypo.collectives import Workers
from raypo.data.item_store import Joined
from raypo.run import reference
from raypo.run.reference import with_references
from raypo.storage.run_files import RunFiles
from raypo.types import Pair
from tests.unit.learner.plain import on_workers

IDS = [np.asarray(row, np.int32) for row in ([5, 6], [7, 8, 2], [9, 2])]
PAIRS = [Pair(IDS[a], IDS[b], IDS[c]) for a, b, c in ((0, 1, 2), (1, 2, 0), (2, 0, 1))]


def test_each_reference_is_asked_once_about_every_pair(tmp_path: Path):
    def log_probs(workers: Workers) -> tuple[list[Any], list[int]]:
        calls: list[int] = []

        def without_adapter(pairs: list[Pair], ask: Any) -> list[tuple[float, float]]:
            calls.append(len(pairs))
            return [(-float(pair.chosen_ids[0]), -float(len(calls))) for pair in pairs]

        run: Any = SimpleNamespace(workers=workers, files=RunFiles(str(tmp_path), "run"))
        learner: Any = SimpleNamespace(task=None, without_adapter=without_adapter, data=workers)
        found = [
            [
                pair.ref_log_probs
                for pair in with_references(run, PAIRS, learner, model=None, name=n)
            ]
            for n in ("one float32", "one float32", "other float32")
        ]
        return found, calls

    for rank, (found, calls) in enumerate(on_workers(2, log_probs)):
        assert found[0] == found[1] == [(-7.0, -1.0), (-9.0, -1.0), (-5.0, -1.0)]
        assert found[2] == [(-7.0, -2.0), (-9.0, -2.0), (-5.0, -2.0)]
        assert calls == [2 - rank] * 2


@pytest.mark.parametrize("packs", [True, False])
def test_workers_that_share_rows_share_those_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packs: bool
):
    group, seen = object(), []
    monkeypatch.setattr(reference, "reads_packed", lambda model: packs)

    def log_probs(policy: Any, pairs: list[Pair], device: str) -> list[tuple[float, float]]:
        seen.append(policy.sequence_group)
        return [(0.0, 0.0)] * len(pairs)

    run: Any = SimpleNamespace(workers=Workers(), files=RunFiles(str(tmp_path), "run"))
    task = SimpleNamespace(module=SimpleNamespace(sequence_group=group), log_probs=log_probs)
    learner: Any = SimpleNamespace(
        task=task, without_adapter=lambda pairs, ask: ask(None, pairs, "cpu"), data=Workers()
    )
    with_references(run, PAIRS, learner, model=nn.Linear(1, 1), name="other")
    assert seen == [group if packs else None]


def test_preferences_are_read_where_they_are_used(tmp_path: Path):
    """They may have images: a copy of all would be as large as the data set."""
    reads: list[int] = []

    class Reads(list[Pair]):
        def __getitem__(self, place: Any) -> Any:
            reads.append(place)
            return super().__getitem__(place)

    def ask(pairs: list[Pair], ask: Any) -> list[tuple[float, float]]:
        return [(float(pair.chosen_ids[0]), 0.0) for pair in pairs]

    workers: Any = SimpleNamespace(rank=0, count=1, broadcast=lambda value: value)
    workers.gather = lambda value: [value]
    run: Any = SimpleNamespace(workers=workers, files=RunFiles(str(tmp_path), "run"))
    learner: Any = SimpleNamespace(task=None, without_adapter=ask, data=workers)
    items = Joined(Reads(PAIRS[:1]), Reads(PAIRS[1:]))
    completed = with_references(run, items, learner, model=None, name="one")
    reads.clear()
    assert len(completed) == 3
    assert reads == []
    assert [pair.ref_log_probs for pair in completed[1:]] == [(9.0, 0.0), (5.0, 0.0)]
    assert completed[-1].chosen_ids.tolist() == PAIRS[2].chosen_ids.tolist()
    assert reads == [0, 1, 1]
