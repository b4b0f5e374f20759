"""Tensors on their way to the host and back, CPU memory in the GPU's place."""

import pytest
import torch

from raypo.models import host_memory
from raypo.models.host_memory import HostMemory


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "HOST", "elsewhere")  # or nothing on a CPU would be moved
    monkeypatch.setattr(host_memory, "BLOCK_BYTES", 64)


def test_what_was_taken_comes_back_and_views_of_it_are_valid():
    flat = torch.arange(100.0)
    view, other = flat[10:20], torch.arange(7)
    host = HostMemory()
    for _ in range(3):
        host.take([view, flat, other])
        assert flat.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        host.take([flat])
        host.give_back()
        assert torch.equal(view, torch.arange(10.0, 20.0))
        assert torch.equal(other, torch.arange(7))


def test_the_places_on_the_host_are_used_again():
    tensors = [torch.rand(30), torch.rand(3)]
    host = HostMemory()
    places = []
    for _ in range(2):
        host.take(tensors)
        places.append([[p.data_ptr() for p in each] for each in host._places.values()])
        host.give_back()
    assert places[0] == places[1]
    blocks = {p.untyped_storage().data_ptr() for each in host._places.values() for p in each}
    assert len(blocks) == 3  # 132 bytes in blocks of 64: what is small shares one


def test_what_does_not_change_is_copied_once():
    weights = torch.ones(5)
    host = HostMemory()
    host.take([weights], unchanged=True)
    host.give_back()
    weights.fill_(2.0)  # against its word, so that the copy can be told apart
    host.take([weights], unchanged=True)
    host.give_back()
    assert weights.tolist() == [1.0] * 5
    host.take([weights.fill_(3.0)])
    host.give_back()
    assert weights.tolist() == [3.0] * 5


def test_what_is_dropped_comes_back_with_its_size_and_takes_no_room_meanwhile():
    scratch, kept = torch.ones(30), torch.arange(4.0)
    host = HostMemory()
    for _ in range(2):
        host.drop([scratch])
        host.take([kept, scratch])
        assert scratch.untyped_storage().nbytes() == kept.untyped_storage().nbytes() == 0
        assert [sum(map(len, each)) for each in host._places.values()] == [16]
        host.give_back()
        scratch.fill_(2.0)
        assert scratch.sum() == 60.0
        assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]
