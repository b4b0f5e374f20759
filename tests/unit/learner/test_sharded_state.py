"""Weights and moments go from one layout of fragments to another, each tensor created once."""

from pathlib import Path

import pytest
import torch
from torch import nn

from raypo.collectives import Workers
from raypo.learner.sharded_state import Fragment, load_fragments, saved_fragments
from raypo.learner.state import write_tensors


def test_a_flat_tensor_of_many_fragments_gets_each_moment_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It may be most of a GPU's memory, so a second one beside it would not fit."""
    a, b = (nn.Parameter(torch.randn(size)) for size in (4, 2))
    optimizer = torch.optim.AdamW([a, b])
    for parameter in (a, b):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    whole = [Fragment("a", 4, 0, 4, a), Fragment("b", 2, 0, 2, b)]
    write_tensors(tmp_path / "0.pt", saved_fragments(whole, optimizer, Workers()))

    flat = nn.Parameter(torch.zeros(6))  # a[1:4], then b, then padding
    parts = [Fragment("a", 4, 1, 3, flat), Fragment("b", 2, 0, 2, flat, offset=3)]
    sharded = torch.optim.AdamW([flat])
    created: list[object] = []
    zeros = torch.zeros

    def counted(*size: object, **options: object) -> torch.Tensor:
        created.append(size[0])
        return zeros(*size, **options)  # type: ignore

    monkeypatch.setattr(torch, "zeros", counted)
    load_fragments([tmp_path / "0.pt"], parts, sharded)
    assert created.count(flat.shape) == 2  # both moments
    assert torch.equal(flat.detach()[:5], torch.cat([a.detach()[1:], b.detach()]))
    for key in ("exp_avg", "exp_avg_sq"):
        expected = torch.cat([optimizer.state[a][key][1:], optimizer.state[b][key], zeros(1)])
        assert torch.equal(sharded.state[flat][key], expected)
    assert sharded.state[flat]["step"] == 1
