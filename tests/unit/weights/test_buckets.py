from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raypo.weights.buckets import ALIGNMENT, Bucket, as_bytes, group_by_size, stage, unpack
from raypo.weights.manifest import WeightError
from tests.stand_ins import pack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def named_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    tensors = {
        f"{dtype}".removeprefix("torch."): torch.randn(5, 3).mul(3).to(dtype) for dtype in DTYPES
    }
    tensors["transposed"] = torch.randn(4, 6).t()
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 4)
    tensors["parameter"] = torch.nn.Parameter(torch.randn(7))
    return tensors


@pytest.mark.parametrize("how", [pack, stage])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1000, 1 << 20])
def test_what_goes_in_comes_out(bucket_bytes: int, how: Callable[..., Iterator[Any]]) -> None:
    tensors = named_tensors()

    buckets = how(tensors.items(), bucket_bytes=bucket_bytes)
    arrived = [
        (name, tensor.clone())  # all that is staged lies in the same memory
        for bucket in buckets
        for name, tensor in unpack(bucket, verify=True)
    ]

    assert [name for name, _ in arrived] == list(tensors)
    for name, tensor in arrived:
        assert tensor.dtype == tensors[name].dtype
        assert tensor.shape == tensors[name].shape
        assert torch.equal(tensor, tensors[name].detach())


def test_a_bucket_keeps_its_size_unless_one_tensor_is_larger() -> None:
    tensors = {"a": torch.ones(10), "b": torch.ones(10), "c": torch.ones(100), "d": torch.ones(1)}

    buckets = list(pack(tensors.items(), bucket_bytes=128))

    staged = [s.entries for s in stage(tensors.items(), bucket_bytes=128)]
    expected = [["a", "b"], ["c"], ["d"]]
    assert [[spec.name for spec in b.specs] for b in buckets] == expected
    assert [[spec.name for spec, _ in entries] for entries in staged] == expected
    assert [[offset for _, offset in entries] for entries in staged] == [[0, ALIGNMENT], [0], [0]]


def test_tensors_may_vanish_as_the_iterator_moves_on() -> None:
    alive: list[str] = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            tensor = torch.full((8,), float(ord(name)))
            alive.append(name)
            yield name, tensor
            tensor.zero_()
            alive.remove(name)

    packing = pack(gathered(), bucket_bytes=32)
    first = next(packing)
    assert alive == ["b"], "the first bucket is handed out before the second tensor is copied"

    values = {name: t.tolist() for b in (first, *packing) for name, t in unpack(b, verify=True)}
    assert values == {name: [float(ord(name))] * 8 for name in "abc"}


def test_bytes_of_whole_tensors_lie_where_the_tensors_are() -> None:
    tensors = {"a": torch.ones(10), "b": torch.ones(10, dtype=torch.bfloat16)}

    (group,) = group_by_size(tensors.items(), bucket_bytes=64)

    assert [as_bytes(t).data_ptr() for _, t in group] == [t.data_ptr() for t in tensors.values()]


def test_read_only_memory_is_viewed_without_copy_or_warning() -> None:
    (bucket,) = pack({"w": torch.arange(6.0)}.items(), bucket_bytes=64)
    (array,) = bucket.arrays
    array.flags.writeable = False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, tensor),) = unpack(bucket)

    assert tensor.data_ptr() == array.ctypes.data


def test_corrupted_bytes_are_noticed() -> None:
    (bucket,) = pack({"v": torch.ones(4), "w": torch.ones(4)}.items(), bucket_bytes=1000)
    v, w = bucket.arrays
    w[3] ^= 1

    with pytest.raises(WeightError, match=r"w: the bytes that arrived do not have the checksum"):
        list(unpack(Bucket((v, w), bucket.specs), verify=True))


def test_a_bucket_pickles_out_of_band() -> None:
    (bucket,) = pack({"w": torch.ones(1000)}.items(), bucket_bytes=1 << 20)
    buffers: list[pickle.PickleBuffer] = []

    head = pickle.dumps(bucket, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(head, buffers=buffers)

    assert len(head) < 1000
    assert np.shares_memory(again.arrays[0], bucket.arrays[0])


def test_bucket_bytes_are_positive() -> None:
    with pytest.raises(ValueError, match=r"bucket_bytes \(0\)"):
        list(pack([], bucket_bytes=0))
