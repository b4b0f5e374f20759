"""Tensors on their way to the host and back, CPU memory in the GPU's place."""

import gc

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
        places.append([[p.data_ptr() for p in each] for _, each in host._places.values()])
        host.give_back()
    assert places[0] == places[1]
    assert len(blocks_of(host)) == 3  # 132 bytes in blocks of 64: what is small shares one


def blocks_of(host: HostMemory) -> set[int]:
    pieces = [piece for _, places in host._places.values() for piece in places] + host._free
    return {piece.untyped_storage().data_ptr() for piece in pieces}


def test_the_next_tensor_gets_the_place_of_one_that_is_gone():
    """As moments that a checkpoint replaces: pinned memory must not grow with each of them."""
    host = HostMemory()
    weights = torch.arange(30.0)
    blocks = []
    for number in range(5):
        moments = torch.full((40,), float(number))
        host.take([weights, moments])
        host.give_back()
        assert moments.tolist() == [float(number)] * 40
        assert weights.tolist() == list(range(30))
        assert len(host._places) == 2
        blocks.append(blocks_of(host))
        del moments
        gc.collect()
    assert blocks[0] == blocks[-1]


def test_a_new_tensor_is_copied_although_a_dead_one_of_its_size_was_not_to_change():
    host = HostMemory()
    for number in range(20):  # the allocator gives an address again soon
        frozen = torch.full((8,), float(number))
        host.take([frozen], unchanged=True)
        host.give_back()
        assert frozen.tolist() == [float(number)] * 8
        del frozen
        gc.collect()


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
        assert [sum(map(len, each)) for _, each in host._places.values()] == [16]
        host.give_back()
        scratch.fill_(2.0)
        assert scratch.sum() == 60.0
        assert kept.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_what_is_zero_comes_back_as_zeros_without_a_copy():
    sums, kept = torch.zeros(30), torch.arange(4.0)
    view = sums[10:20]
    host = HostMemory()
    for _ in range(2):
        host.drop([sums], zeros=True)
        host.take([kept])
        assert sums.untyped_storage().nbytes() == 0
        assert [sum(map(len, each)) for _, each in host._places.values()] == [16]
        host.give_back()
        assert not sums.any()
        view += 1.0
        assert sums.sum() == 10.0
