"""The head statistics as GPUs get them: compiled, here by inductor for the CPU."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from raypo.models import chunk_sizes
from raypo.models import token_log_probs as module
from raypo.models.token_log_probs import head_log_probs, token_log_probs

VOCABULARY = 301
ROWS = (7, 2, 3, 64, 1, 33, 5)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_is_compiled", lambda logits: len(logits) > 0)
    module._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()


def expected(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy in float64 by autograd; what cannot be sampled adds nothing."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    finite = log_p.masked_fill(log_p == -torch.inf, 0.0)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * finite).sum(-1)


def gradient(told: Sequence[Tensor | None], of: Tensor) -> Tensor:
    """The gradient of a sum in which every log-prob and every entropy has its own weight."""
    parts = [part for part in told if part is not None]
    weights = [torch.linspace(-1.0, 2.0, len(parts[0]), dtype=torch.float64) + i for i in (0, 1)]
    total = sum((part.double() * w).sum() for part, w in zip(parts, weights, strict=False))
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, of)[0]


def scores(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits, some of them -inf, and ids of tokens that are not."""
    torch.manual_seed(rows)
    logits = (4.0 * torch.randn(rows, VOCABULARY)).to(dtype)
    logits[:, ::7] = -torch.inf
    return logits.requires_grad_(), 1 + 7 * torch.randint(VOCABULARY // 7, (rows,))


@pytest.mark.parametrize(
    ("dtype", "temperature", "with_entropy"),
    [
        (torch.float64, 0.7, True),
        (torch.float32, 1.0, True),
        (torch.float32, 0.7, False),
        (torch.bfloat16, 0.7, True),
    ],
)
def test_log_probs_entropy_and_gradients_are_those_of_float64_in_four_graphs(
    dtype: torch.dtype, temperature: float, with_entropy: bool
) -> None:
    for rows in ROWS:
        logits, ids = scores(rows, dtype)
        told = token_log_probs(logits, ids, temperature=temperature, with_entropy=with_entropy)
        exact = logits.detach().double().requires_grad_()
        wanted = expected(exact, ids, temperature)[: 1 + with_entropy]
        bound = TOLERANCE[torch.promote_types(dtype, torch.float32)]
        for got, want in zip(told, wanted, strict=False):
            assert got is not None
            torch.testing.assert_close(got.double(), want, atol=bound, rtol=bound)
        got, want = gradient(told, logits), gradient(wanted, exact)
        assert got.dtype == dtype
        bound = TOLERANCE[dtype] * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, atol=bound, rtol=0)
    # Forward and backward, each for one row and for several.
    assert 0 < counters["stats"]["unique_graphs"] <= 4


def test_a_head_in_chunks_has_the_same_gradients_also_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On GPUs autograd runs the backward pass in a thread of its own."""
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": 5 * VOCABULARY})
    dtype = torch.bfloat16
    torch.manual_seed(0)
    head = torch.nn.Linear(16, VOCABULARY, dtype=dtype)
    states = torch.randn(13, 16, dtype=dtype, requires_grad=True)
    ids = torch.randint(VOCABULARY, (13,))
    leaves = (states, *head.parameters())
    told = head_log_probs(head, states, ids, 0.7, True)
    found: list[Any] = []

    def backward() -> None:
        weights = torch.linspace(-1.0, 2.0, 13)
        total = (told[0] * weights).sum() + 0.3 * told[1].sum()
        found.extend(torch.autograd.grad(total, leaves))

    with torch.inference_mode():  # as a reference asks
        alone = head_log_probs(head, states, ids, 0.7, True)
    for got, want in zip(alone, told, strict=True):
        assert torch.equal(got, want)
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()

    exact = [each.detach().double().requires_grad_() for each in leaves]
    wanted = expected(exact[0] @ exact[1].t() + exact[2], ids, 0.7)
    weights = torch.linspace(-1.0, 2.0, 13)
    total = (wanted[0] * weights).sum() + 0.3 * wanted[1].sum()
    for got, want in zip(found, torch.autograd.grad(total, exact), strict=True):
        bound = TOLERANCE[dtype] * float(want.abs().max())
        torch.testing.assert_close(got.double(), want, atol=bound, rtol=0)
