"""What a policy learns from a teacher: divergences by hand, whatever the cut and the chunks."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from raypo.config import DistillationSection
from raypo.learner.distillation_task import DistillationTask
from raypo.models import chunk_sizes
from raypo.ppo.divergences import divergences
from raypo.types import Taught
from tests.unit.learner.plain import VOCABULARY, tiny_llama


def taught(count: int) -> list[Taught]:
    """Responses of 1 to 5 tokens to two prompts, and what the teacher says of them."""
    generator = np.random.default_rng(0)
    items = []
    for row in range(5):
        prompt = np.arange(2 + row % 2, dtype=np.int32)
        response = generator.integers(0, VOCABULARY, 1 + row).astype(np.int32)
        found = logits_of(1, prompt, response).log_softmax(-1).topk(count)
        log_probs, ids = found.values.float().numpy(), found.indices.int().numpy()
        items.append(Taught(prompt, response, log_probs, ids))
    return items


def logits_of(seed: int, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """[T, V] of a plain forward pass, in the places of the response's tokens."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
    with torch.no_grad():
        return tiny_llama(seed)(ids).logits[0, len(prompt) - 1 : -1]


def loss_and_gradients(section: DistillationSection, pieces: list[list[Taught]]):
    task = DistillationTask(deepcopy(tiny_llama()), section, vocabulary=VOCABULARY)
    task.module.zero_grad()
    total = 0.0
    for piece in pieces:
        loss, _ = task.loss(task.module, piece, "cpu")
        loss.backward()
        total += float(loss.detach())
    gradients = [p.grad for p in task.module.parameters() if p.grad is not None]
    return total, torch.cat([each.flatten() for each in gradients])


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("count", [VOCABULARY, 3])
def test_the_loss_is_the_sum_of_the_divergences_at_all_response_tokens(kind, count):
    section, items = DistillationSection(divergence=kind), taught(count)
    by_hand = 0.0
    for item in items:
        student = logits_of(0, item.prompt_ids, item.response_ids)
        told = torch.from_numpy(item.teacher_log_probs), torch.from_numpy(item.teacher_ids).long()
        by_hand += float(divergences(student, *told, kind=kind).sum())
    total, _ = loss_and_gradients(section, [items])
    assert total == pytest.approx(by_hand, rel=1e-6)
    assert total > 0.1


def test_neither_the_cut_nor_the_chunks_matter(monkeypatch):
    section, items = DistillationSection(), taught(4)
    whole, gradients = loss_and_gradients(section, [items])
    monkeypatch.setattr(
        chunk_sizes, "CHUNK_ELEMENTS", {"cpu": 2 * VOCABULARY}
    )  # two tokens a chunk
    for pieces in ([items], [items[:2], items[2:]], [[each] for each in items[::-1]]):
        total, others = loss_and_gradients(section, pieces)
        assert total == pytest.approx(whole, rel=1e-9)
        # Llama's norms compute in float32, whatever the model.
        torch.testing.assert_close(others, gradients, atol=1e-5, rtol=1e-5)


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    items = [
        Taught(item.prompt_ids, item.response_ids, own.values.numpy(), own.indices.int().numpy())
        for item in taught(3)
        for own in [logits_of(0, item.prompt_ids, item.response_ids).log_softmax(-1).topk(3)]
    ]
    total, gradients = loss_and_gradients(DistillationSection(), [items])
    assert total == pytest.approx(0.0, abs=1e-6)
    assert float(gradients.abs().max()) < 1e-5


def test_the_shortest_example_takes_part_in_a_pass():
    task = DistillationTask(deepcopy(tiny_llama()), DistillationSection(), vocabulary=VOCABULARY)
    loss, _ = task.loss(task.module, [task.blank], "cpu")
    assert bool(torch.isfinite(loss))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_self_distillation_is_the_divergence_from_the_policy_that_reads_more(kind):
    """SDPO, eq. of the loss: KL(pi(. | x, y<t) || sg pi(. | x, f, y<t)), in float64 by hand."""
    section = DistillationSection(divergence=kind, top_k=None)
    task = DistillationTask(deepcopy(tiny_llama()), section, vocabulary=VOCABULARY)
    shown = np.array([9, 8, 7, 1], np.int32)
    items = taught(1)
    read = [replace(item, prompt_ids=np.append(shown, item.prompt_ids)) for item in items]
    with torch.no_grad():
        opinions = task.top_log_probs(task.module, read, "cpu")
    known = [
        replace(item, teacher_log_probs=log_probs, teacher_ids=ids)
        for item, (log_probs, ids) in zip(items, opinions, strict=True)
    ]
    total, _ = task.loss(task.module, known, "cpu")
    total.backward()

    exact = deepcopy(tiny_llama()).double()
    by_hand = torch.zeros((), dtype=torch.float64)
    for item, behind in zip(items, read, strict=True):
        student, teacher = (
            exact(torch.from_numpy(np.concatenate([prompt, item.response_ids])).long()[None])
            .logits[0, len(prompt) - 1 : -1]
            .log_softmax(-1)
            for prompt in (item.prompt_ids, behind.prompt_ids)
        )
        one, other = (teacher, student) if kind == "forward_kl" else (student, teacher)
        one, other = (each.detach() if each is teacher else each for each in (one, other))
        by_hand = by_hand + (one.exp() * (one - other)).sum()
    by_hand.backward()
    assert total.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert total.item() > 0.01
    for mine, theirs in zip(task.module.model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)
