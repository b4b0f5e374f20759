from __future__ import annotations

import pytest
import torch

from raypo.weights.buckets import pack, unpack
from raypo.weights.manifest import WeightError
from raypo.weights.transport import LocalTransport, receive

TENSORS = {"a": torch.arange(20.0), "b": torch.ones(3, 3, dtype=torch.bfloat16)}


def test_a_push_names_what_it_carries() -> None:
    push = LocalTransport().send(pack(TENSORS.items(), bucket_bytes=64), version=7)

    assert repr(push) == "WeightPush(v7, 2 tensors)"
    assert [(t.name, t.shape, t.dtype) for t in push.manifest.tensors] == [
        ("a", (20,), "float32"),
        ("b", (3, 3), "bfloat16"),
    ]
    arrived = dict(item for bucket in receive(push) for item in unpack(bucket, verify=True))
    assert all(torch.equal(arrived[name], tensor) for name, tensor in TENSORS.items())


def test_a_tensor_sent_twice_is_refused() -> None:
    twice = [("a", torch.ones(1)), ("a", torch.ones(1))]
    with pytest.raises(WeightError, match="named twice: a"):
        LocalTransport().send(pack(twice, bucket_bytes=64), version=1)
