"""Logits of [tokens, vocabulary] never exist in the learner, forward or backward."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from raypo.config import DistillationSection
from raypo.learner.distillation_task import DistillationTask
from raypo.learner.tasks import response_batch
from raypo.models import chunk_sizes, token_log_probs
from raypo.models.networks import Policy
from raypo.types import Example, Taught

VOCABULARY, TOKENS, CHUNK = 2048, 200, 8
WHOLE = TOKENS * VOCABULARY * 4
"""Bytes of the logits of all response tokens, in float32."""
PROMPT = np.arange(3, dtype=np.int32)
RESPONSE = np.arange(TOKENS, dtype=np.int32)


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation has made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return made


def largest(loss: Callable[[], torch.Tensor]) -> int:
    with Largest() as seen:
        loss().backward()
    return seen.num_bytes


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config)


def of_all_logits(model: Any) -> torch.Tensor:
    return model(torch.from_numpy(RESPONSE)[None].long()).logits.sum()


def of_log_probs(model: Any) -> torch.Tensor:
    batch = response_batch([Example(PROMPT, RESPONSE)])
    both = Policy(model, temperature=0.7)(batch, with_entropy=True, entropy_grad=True)
    return both[0].sum() + both[1].sum()


def of_divergences(model: Any) -> torch.Tensor:
    task = DistillationTask(model, DistillationSection(), vocabulary=VOCABULARY)
    told = (
        np.full((TOKENS, 2), -1.0, np.float32),
        np.tile(np.arange(2, dtype=np.int32), (TOKENS, 1)),
    )
    return task.loss(task.module, [Taught(PROMPT, RESPONSE, *told)], "cpu")[0]


@pytest.mark.parametrize("loss", [of_log_probs, of_divergences])
def test_the_largest_tensor_is_a_chunk_of_the_logits(model, monkeypatch, loss):
    monkeypatch.setattr(chunk_sizes, "CHUNK_ELEMENTS", {"cpu": CHUNK * VOCABULARY})
    monkeypatch.setattr(token_log_probs, "SCRATCH_ELEMENTS", {"cpu": CHUNK * VOCABULARY})
    assert largest(lambda: of_all_logits(model)) >= WHOLE, "it is seen where they exist"
    assert largest(lambda: loss(model)) <= WHOLE // 4
