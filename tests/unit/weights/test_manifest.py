from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import xxhash

from raypo.weights.manifest import Manifest, TensorSpec, WeightError, checksums, summary, word_sum

NORM = TensorSpec("norm.weight", (4,), "float32", 17)
HEAD = TensorSpec("head.weight", (8, 4), "float32", 23)


def test_equal_manifests_have_no_differences() -> None:
    assert Manifest.of(3, [NORM, HEAD]).differences(Manifest.of(3, [HEAD, NORM])) == []


def test_a_tensor_that_was_sent_twice_is_refused() -> None:
    with pytest.raises(WeightError, match=r"these occur twice: norm\.weight"):
        Manifest.of(3, [NORM, HEAD, NORM])


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
    with pytest.raises(WeightError, match=r"only once.*: norm\.weight"):
        Manifest.of(1, [NORM, NORM])


def test_checksums_see_every_byte() -> None:
    part = torch.arange(1000, dtype=torch.int64).view(torch.uint8)
    assert checksums([part, part[:0]]) == [
        xxhash.xxh3_64_intdigest(part.numpy().tobytes()),
        xxhash.xxh3_64_intdigest(b""),
    ]


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 8 * 999, 8 * 1000 + 3])
def test_the_sum_that_gpus_take_sees_a_change_and_an_exchange(num_bytes: int) -> None:
    part = torch.arange(8008).to(torch.uint8)[:num_bytes]
    whole = word_sum(part)
    assert whole == word_sum(part, chunk_words=64), "the cut into chunks is not seen"
    for place in (0, num_bytes // 2, num_bytes - 1):
        if num_bytes:
            changed = part.clone()
            changed[place] ^= 1
            assert word_sum(changed) != whole
    if num_bytes >= 24:
        exchanged = part.clone()
        exchanged[:16] = part[:16].roll(8)
        assert word_sum(exchanged) != whole


def test_summary_counts_what_it_leaves_out() -> None:
    assert summary(["a", "b"]) == "a; b"
    assert summary(["a", "b", "c"], max_lines=1) == "a; and 2 more"
