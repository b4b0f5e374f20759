"""Lookups that could take torch's kernel with a race take more tokens, and learn the same."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from raypo.models.embedding import avoid_racy_counts
from raypo.models.packed_attention import _at
from tests.unit.learner.plain import VOCABULARY, tiny_llama


def states_and_gradient(ids: Tensor, *, avoids: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Returns states, the gradient of the embedding, and how many tokens each lookup took."""
    network = deepcopy(tiny_llama())
    embedding: Any = network.get_input_embeddings()
    counts: list[int] = []
    original = embedding.forward

    def counted(ids: Tensor) -> Tensor:
        counts.append(ids.numel())
        return original(ids)

    embedding.forward = counted
    if avoids:
        avoid_racy_counts(network)
    states = embedding(ids)
    weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    (states * weight).sum().backward()
    return states.detach(), embedding.weight.grad, counts


@pytest.mark.parametrize("shape", [(1, 1024), (1, 1025), (2, 900), (1, 3072), (1, 4096), (1, 5000)])
def test_no_lookup_takes_a_racy_number_of_tokens_and_no_bit_of_a_gradient_differs(
    shape: tuple[int, int],
):
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    expected, plain, counts = states_and_gradient(ids, avoids=False)
    states, gradient, taken = states_and_gradient(ids, avoids=True)
    assert torch.equal(states, expected)
    assert torch.equal(gradient, plain)
    tokens = ids.numel()
    assert counts == [tokens]
    assert taken == [4097 if 1024 < tokens < 4097 else tokens]


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
@pytest.mark.parametrize("num_places", [5, 2000])
def test_states_at_places_and_their_gradient_are_those_of_plain_indexing(
    shape: tuple[int, ...], num_places: int
):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(50, *shape, generator=generator).requires_grad_()
    places = torch.randint(0, 40, (num_places,), generator=generator)  # some often, some never
    found = _at(tokens, places)
    assert torch.equal(found, tokens[places])
    weight = torch.randn(found.shape, generator=generator)
    (gradient,) = torch.autograd.grad((found * weight).sum(), tokens)
    expected = torch.zeros(50, *shape, dtype=torch.float64)
    for place, each in zip(places.tolist(), weight.double(), strict=True):
        expected[place] += each
    assert torch.allclose(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    assert not gradient[40:].any()


def test_off_the_cpu_states_at_places_do_not_take_the_backward_pass_of_an_embedding():
    tokens = torch.empty(2000, 4, device="meta", requires_grad=True)
    node = _at(tokens, torch.empty(2000, dtype=torch.int64, device="meta")).grad_fn
    names = []
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    assert names[0] == "IndexBackward0"
    assert not [name for name in names if "Embedding" in name]
