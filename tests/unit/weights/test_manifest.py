from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest

from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksum, summary

NORM = TensorSpec("norm.weight", (4,), "float32", 17)
HEAD = TensorSpec("head.weight", (8, 4), "float32", 23)


def test_equal_manifests_have_no_differences() -> None:
    assert Manifest.of(3, [NORM, HEAD]).differences(Manifest.of(3, [HEAD, NORM])) == []


def test_every_difference_is_told() -> None:
    sent = Manifest.of(3, [NORM, HEAD])
    received = Manifest.of(
        4, [replace(HEAD, shape=(4, 8), dtype="bfloat16", checksum=1), replace(NORM, name="x")]
    )

    assert sent.differences(received) == [
        "version: 3 -> 4",
        "norm.weight: missing",
        "x: unknown",
        "head.weight: shape (8, 4) -> (4, 8)",
        "head.weight: dtype float32 -> bfloat16",
        "head.weight: checksum 23 -> 1",
    ]


def test_a_name_comes_once() -> None:
    with pytest.raises(WeightError, match=r"named twice: norm\.weight"):
        Manifest.of(1, [NORM, NORM])


def test_checksum_is_of_the_bytes() -> None:
    data = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert checksum(data) == zlib.crc32(data.tobytes())
    data.flags.writeable = False
    assert checksum(data[:0]) == 0


def test_summary_counts_what_it_leaves_out() -> None:
    assert summary(["a", "b"]) == "a; b"
    assert summary(["a", "b", "c"], at_most=1) == "a; and 2 more"
