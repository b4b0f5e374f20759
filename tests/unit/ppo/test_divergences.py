"""Divergences of two next-token distributions against loops in float64."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from raypo.ppo.divergences import divergences

N, V = 6, 11
KINDS = ("forward_kl", "reverse_kl", "jsd")


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randn(N, V, generator=generator, dtype=dtype)


def told(teacher: Tensor, count: int) -> tuple[Tensor, Tensor]:
    top = teacher.log_softmax(-1).topk(count)
    return top.values, top.indices


def by_hand(p: list[float], q: list[float], kind: str, beta: float) -> float:
    """Of a teacher p and a student q."""

    def kl(one: list[float], other: list[float]) -> float:
        return math.fsum(a * math.log(a / b) for a, b in zip(one, other, strict=True) if a > 0.0)

    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    m = [beta * a + (1.0 - beta) * b for a, b in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1.0 - beta) * kl(q, m)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("count", [V, 4, 1])
def test_each_token_has_the_divergence_of_a_loop(kind, beta, count):
    student, teacher = logits(0), logits(1)
    log_probs, ids = told(teacher, count)
    found = divergences(student, log_probs, ids, kind=kind, beta=beta)
    for row in range(N):
        p = log_probs[row].exp().tolist()
        q = student[row].softmax(-1)[ids[row]].tolist()
        if count < V:  # all others are one event
            p, q = [*p, 1.0 - math.fsum(p)], [*q, 1.0 - math.fsum(q)]
        assert float(found[row]) == pytest.approx(by_hand(p, q, kind, beta), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_agrees_with_float64(kind):
    exact = divergences(logits(0), *told(logits(1), V), kind=kind)
    rounded = divergences(logits(0).float(), *told(logits(1).float(), V), kind=kind)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [V, 4])
def test_gradients_are_those_of_finite_differences(kind, count):
    student = logits(0).requires_grad_()
    log_probs, ids = told(logits(1), count)
    assert torch.autograd.gradcheck(
        lambda z: divergences(z, log_probs, ids, kind=kind, beta=0.3), (student,)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_tokens_give_a_lower_bound_that_rises_to_the_whole(kind):
    student, teacher = logits(0), logits(1)
    sums = [divergences(student, *told(teacher, k), kind=kind) for k in (1, 3, 6, V)]
    for fewer, more in pairwise(sums):
        assert (fewer <= more + 1e-9).all()
    assert (sums[0] >= 0.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_the_teacher_has_none_and_stays(kind):
    student = logits(1).requires_grad_()
    for count in (V, 3):
        found = divergences(student, *told(logits(1), count), kind=kind)
        assert float(found.detach().abs().max()) < 1e-6
        (grad,) = torch.autograd.grad(found.sum(), student)
        assert float(grad.abs().max()) < 1e-5


def test_the_ends_of_jsd_have_the_gradients_of_the_two_kls():
    def direction(kind: str, beta: float = 0.5) -> Tensor:
        student = logits(0).requires_grad_()
        total = divergences(student, *told(logits(1), V), kind=kind, beta=beta).sum()  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad(total, student)
        return grad.flatten() / grad.norm()

    assert float(direction("jsd", 1e-4) @ direction("forward_kl")) > 0.999
    assert float(direction("jsd", 1.0 - 1e-4) @ direction("reverse_kl")) > 0.99


@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_who_is_sure_gives_finite_numbers(kind):
    teacher = torch.zeros(N, V)
    teacher[:, 2] = 60.0
    for count in (V, 3):
        student = logits(0).float().requires_grad_()
        found = divergences(student, *told(teacher, count), kind=kind)
        (grad,) = torch.autograd.grad(found.sum(), student)
        assert bool(torch.isfinite(found).all() & torch.isfinite(grad).all())


def test_logits_that_no_token_has_do_not_count():
    wider = torch.cat([logits(0), torch.full((N, 3), 5.0, dtype=torch.float64)], -1)
    log_probs, ids = told(logits(1), V)
    found = divergences(wider, log_probs, ids, kind="jsd", vocabulary=V)
    torch.testing.assert_close(found, divergences(logits(0), log_probs, ids, kind="jsd"))
