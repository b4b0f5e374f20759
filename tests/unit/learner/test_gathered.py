"""Gathers of sharded weights: in buckets, and without room on one worker all fail together."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raypo.collectives import Workers
from raypo.learner import trained_model
from raypo.learner.trained_model import TrainedModel
from raypo.models.lora import Weight
from tests.unit.learner.plain import on_workers

WEIGHTS = [Weight(f"w{i}", (nn.Parameter(torch.full((size,), float(i))),)) for i, size in
           enumerate([10, 20, 30, 100, 5])]  # fmt: skip


def sharded(workers: Workers, gathers: list[list[int]]) -> TrainedModel:
    """A model whose gathers are noted, without DeepSpeed."""

    @contextmanager
    def gathered(parts: Sequence[nn.Parameter], enabled: bool) -> Iterator[None]:
        assert enabled
        gathers.append([part.numel() for part in parts])
        yield

    made: Any = object.__new__(TrainedModel)
    made._stage, made._workers, made._masters = 3, workers, {}
    made._gathered_parameters = gathered
    made._engine = SimpleNamespace(device=torch.device("cpu"))
    return made


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_model, "GATHER_BYTES", 4 * 60)


def test_weights_are_gathered_in_buckets_in_their_order():
    gathers: list[list[int]] = []
    tied = Weight("again", WEIGHTS[-1].parts)
    named = sharded(Workers(), gathers).gathered([*WEIGHTS, tied])
    assert [(name, float(weight[0])) for name, weight in named] == [
        *((f"w{i}", float(i)) for i in range(5)),
        ("again", 4.0),
    ]
    assert gathers == [[10, 20, 30], [100], [5]]


def test_if_one_worker_has_no_room_none_begins_the_gather(monkeypatch: pytest.MonkeyPatch):
    """It would otherwise wait in NCCL for the one that has failed."""
    gathers: dict[int, list[list[int]]] = {0: [], 1: []}
    told: dict[int, str] = {}
    empty = torch.empty

    def push(workers: Workers) -> list[str]:
        names = []
        try:
            for name, _ in sharded(workers, gathers[workers.rank]).gathered(WEIGHTS):
                names.append(name)
        except RuntimeError as error:
            told[workers.rank] = str(error)
        return names

    def limited(*size: Any, **options: Any) -> torch.Tensor:
        if size == (400,) and options["dtype"] == torch.uint8 and next(asked) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 400 bytes\nmore")
        return empty(*size, **options)

    asked = itertools.count()  # only the first of the two workers has no room
    monkeypatch.setattr(torch, "empty", limited)
    assert on_workers(2, push) == [["w0", "w1", "w2"]] * 2
    assert gathers == {0: [[10, 20, 30]], 1: [[10, 20, 30]]}
    failed = next(rank for rank, text in told.items() if text.startswith("CUDA out of memory"))
    assert told[1 - failed] == (
        f"learner worker {failed} could not gather weights: CUDA out of memory. Tried to allocate "
        "400 bytes."
    )
