from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raypo.collectives import Workers
from raypo.weight_sync.transport import all_or_none, drained
from raypo.weights.buckets import Bucket, unpack
from raypo.weights.manifest import WeightError
from tests.stand_ins import local_push, pack

TENSORS = {"a": torch.arange(20.0), "b": torch.ones(3, 3, dtype=torch.bfloat16)}


def test_a_push_names_what_it_carries() -> None:
    push = local_push(pack(TENSORS.items(), bucket_bytes=64), version=7)

    assert repr(push) == "WeightPush(v7, 2 tensors)"
    assert [(t.name, t.shape, t.dtype) for t in push.manifest.tensors] == [
        ("a", (20,), "float32"),
        ("b", (3, 3), "bfloat16"),
    ]
    held = [bucket for bucket in push.buckets if isinstance(bucket, Bucket)]
    arrived = dict(item for bucket in held for item in unpack(bucket, verify=True))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_sent_twice_is_refused() -> None:
    twice = [("a", torch.ones(1)), ("a", torch.ones(1))]
    with pytest.raises(WeightError, match="these occur twice: a"):
        local_push(pack(twice, bucket_bytes=64), version=1)


def test_a_push_that_fails_goes_on_gathering_with_the_other_workers() -> None:
    gathered = []

    def tensors() -> Any:
        for name in "abcd":
            gathered.append(name)
            yield name, torch.ones(1)

    def fail_at_the_second() -> None:
        with drained(tensors()) as iterator:
            next(iterator)
            next(iterator)
            raise WeightError("an engine said no")

    with pytest.raises(WeightError, match="an engine said no"):
        fail_at_the_second()
    assert gathered == list("abcd")


def test_where_one_worker_fails_all_do() -> None:
    @dataclass(frozen=True)
    class Among(Workers):
        said_by_all: tuple[str | None, ...] = ()

        def gather(self, value: Any) -> list[Any]:
            return [value or said for said in self.said_by_all]

    with (
        pytest.raises(WeightError, match="worker 1 could not push the weights: OSError: full"),
        all_or_none(Among(said_by_all=(None, "OSError: full"))),
    ):
        pass
    with pytest.raises(OSError, match="disk"), all_or_none(Workers()):
        raise OSError("disk")
    with all_or_none(Workers()):
        pass
