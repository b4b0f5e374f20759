"""Copies in RAM are equal, their own, and reuse their memory."""

from pathlib import Path

import pytest
import torch

from raypo.learner import host_copies
from raypo.learner.host_copies import HostCopies, tensors_in
from raypo.learner.state import write_tensors


def state(value: float) -> dict:
    flat = torch.arange(40, dtype=torch.float32) * value
    return {
        "a.pt": {
            "weight": {"numel": 9, "moments": {"x": flat[3:12], "y": flat[20:]}, "step": None},
            "empty": torch.zeros(0),
            "count": torch.tensor(3.0),
            "half": torch.full((2, 3), value, dtype=torch.bfloat16).t(),
        },
        "b.pt": {"random": torch.get_rng_state()},
    }


def test_copies_stay_as_they_were_and_are_written_without_the_rest_of_their_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_copies, "BLOCK_BYTES", 256)  # less than all, more than most
    copies, blocks = HostCopies(), []
    for value in (1.0, -2.0):
        original, expected = state(value), state(value)
        copies.restart()
        copied = copies.of(original)
        for tensor in tensors_in(original):
            tensor.zero_()
        for found, wanted in zip(tensors_in(copied), tensors_in(expected), strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
        assert copied["a.pt"]["weight"]["numel"] == 9
        path = tmp_path / "a.pt"
        write_tensors(path, copied["a.pt"])
        assert torch.equal(torch.load(path)["half"], expected["a.pt"]["half"])
        blocks.append([block.data_ptr() for block in copies._blocks])
    assert blocks[0] == blocks[1], "the memory is reused"
    write_tensors(tmp_path / "whole.pt", {"x": torch.zeros(1_000)})
    monkeypatch.undo()
    write_tensors(tmp_path / "copy.pt", HostCopies().of({"x": torch.zeros(1_000)}))
    sizes = [(tmp_path / name).stat().st_size for name in ("whole.pt", "copy.pt")]
    assert sizes[0] == sizes[1]
