"""Preference tasks of a policy: pairs of responses (DPO and variants), or single ones (KTO).

B pairs or single responses, T response tokens. A `Verdict` is a single response that is marked as
desirable or undesirable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import DPOSection
from raypo.learner.tasks import PolicyTask, Sums, response_batch
from raypo.ppo.preferences import PairLoss, Responses, is_per_token, kto_kl, kto_losses, pair_losses
from raypo.types import Example, Pair, Verdict, to_device

_TOKEN = np.zeros(1, np.int32)


class PreferenceTask(PolicyTask[Pair]):
    """Task that makes a policy prefer chosen to rejected responses (`raypo.ppo.preferences`)."""

    blank = Pair(_TOKEN, _TOKEN, _TOKEN, ref_log_probs=(0.0, 0.0))

    def __init__(self, model: Any, section: DPOSection) -> None:
        """Wrap a causal language model."""
        super().__init__(model)
        self._section = section

    def log_probs(
        self, model: Any, items: Sequence[Pair], device: Any
    ) -> list[tuple[float, float]]:
        """Return a model's log-probs of both responses of each pair, summed over their tokens."""
        chosen, rejected = _of_pairs(model, items, device)
        return list(zip(chosen.log_probs.tolist(), rejected.log_probs.tolist(), strict=True))

    def loss(self, model: Any, items: Sequence[Pair], device: Any) -> tuple[Tensor, Sums]:
        """Return the loss of the pairs, and rewards, margins and log-probs of both responses."""
        dpo = self._section
        kind = cast(PairLoss, dpo.loss)
        chosen, rejected = _of_pairs(model, items, device)
        assert not dpo.needs_reference or chosen.ref_log_probs is not None
        losses = pair_losses(
            chosen,
            rejected,
            kind=kind,
            beta=dpo.beta,
            label_smoothing=dpo.label_smoothing,
            simpo_gamma=dpo.simpo_gamma,
            margins=to_device(torch.tensor([pair.margin for pair in items]), device),
        )
        count = float(len(items))
        nll = -chosen.log_probs / chosen.num_tokens
        if dpo.sft_coef:
            losses = losses + dpo.sft_coef * nll
        per_token = is_per_token(kind)
        better = chosen.rewards(dpo.beta, per_token=per_token).detach()
        worse = rejected.rewards(dpo.beta, per_token=per_token).detach()
        right = (better > worse).float() + 0.5 * (better == worse).float()
        sums: Sums = {
            "loss": (losses.detach().sum(), count),
            "accuracy": (right.sum(), count),
            "margin_mean": ((better - worse).sum(), count),
            "sft_loss": (nll.detach().sum(), count),
            **_told("chosen", chosen, better),
            **_told("rejected", rejected, worse),
        }
        return losses.sum(), sums


class VerdictTask(PolicyTask[Verdict]):
    """Task that makes desirable responses more likely and undesirable ones less (KTO)."""

    blank = Verdict(_TOKEN, _TOKEN, True, _TOKEN, ref_log_probs=(0.0, 0.0))

    def __init__(self, model: Any, section: DPOSection) -> None:
        """Wrap a causal language model."""
        super().__init__(model)
        self._section = section
        self._kl = 0.0

    def log_probs(
        self, model: Any, items: Sequence[Verdict], device: Any
    ) -> list[tuple[float, float]]:
        """Return log-probs of each response and of the item's `other_ids` after the same prompt.

        They are summed over tokens. `other_ids` is a response to another prompt, from which the KL
        is estimated.
        """
        own, others = _evaluated(
            model,
            [_example(item, item.response_ids) for item in items]
            + [_example(item, item.other_ids) for item in items],
            device,
        )[0].chunk(2)
        return list(zip(own.tolist(), others.tolist(), strict=True))

    @torch.no_grad()
    def before_losses(
        self, model: Any, pieces: Sequence[Sequence[Verdict]], workers: Workers, device: Any
    ) -> None:
        """Estimate the KL from the reference model over the whole batch of all workers."""
        total, count = torch.zeros((), dtype=torch.float64, device=device), 0
        for piece in pieces:
            items = piece or [self.blank]
            others = [_example(item, item.other_ids) for item in items]
            log_probs, num_tokens = _evaluated(model, others, device)
            references = _references(items, 1, device)
            assert references is not None
            ratios = Responses(log_probs, num_tokens, references).log_ratios
            total, count = total + ratios[: len(piece)].sum(), count + len(piece)
        self._kl = kto_kl(*workers.sum(as_tensor(float(total), count)).tolist())

    def loss(self, model: Any, items: Sequence[Verdict], device: Any) -> tuple[Tensor, Sums]:
        """Return the summed KTO loss, and metrics of desirable and undesirable responses."""
        dpo = self._section
        examples = [_example(item, item.response_ids) for item in items]
        log_probs, num_tokens = _evaluated(model, examples, device)
        references = _references(items, 0, device)
        assert references is not None
        responses = Responses(log_probs, num_tokens, references)
        verdicts = torch.tensor([item.is_desirable for item in items])
        is_desirable = to_device(verdicts, device)
        losses = kto_losses(
            responses,
            is_desirable,
            beta=dpo.beta,
            kl=self._kl,
            desirable_weight=dpo.desirable_weight,
            undesirable_weight=dpo.undesirable_weight,
        )
        count = float(len(items))
        rewards = responses.rewards(dpo.beta).detach()
        right = (rewards > dpo.beta * self._kl) == is_desirable
        sums: Sums = {
            "loss": (losses.detach().sum(), count),
            "accuracy": (right.sum(), count),
            "kl": (self._kl * count, count),
        }
        for name, kind in (("chosen", verdicts), ("rejected", ~verdicts)):
            rows = to_device(torch.nonzero(kind).flatten(), device)
            if len(rows):
                of_kind = Responses(log_probs[rows], num_tokens[rows], references[rows])
                sums |= _told(name, of_kind, rewards[rows])
        return losses.sum(), sums


def _example(item: Pair | Verdict, response_ids: np.ndarray) -> Example:
    """Return the prompt of a preference with a response."""
    return Example(item.prompt_ids, response_ids, images=item.images)


def _of_pairs(model: Any, items: Sequence[Pair], device: Any) -> tuple[Responses, Responses]:
    """Evaluate chosen and rejected responses in one pass, so that they share their prompts."""
    log_probs, num_tokens = _evaluated(
        model,
        [_example(pair, pair.chosen_ids) for pair in items]
        + [_example(pair, pair.rejected_ids) for pair in items],
        device,
    )
    rows = zip(log_probs.chunk(2), num_tokens.chunk(2), (0, 1), strict=True)
    chosen, rejected = (
        Responses(sums, tokens, _references(items, which, device)) for sums, tokens, which in rows
    )
    return chosen, rejected


def _evaluated(model: Any, items: Sequence[Example], device: Any) -> tuple[Tensor, Tensor]:
    """Return log-probs of responses, summed over their tokens, and token counts; [B] each."""
    batch = response_batch(items).to(device)
    log_probs, _ = model(batch)  # [B, T]
    mask = batch.response_mask
    return torch.where(mask, log_probs, 0.0).sum(1), mask.sum(1).to(log_probs.dtype)


def _references(
    items: Sequence[Pair] | Sequence[Verdict], which: int, device: Any
) -> Tensor | None:
    """Return reference log-probs [B] of response `which` (0 or 1), or None if not computed."""
    log_probs = [item.ref_log_probs[which] for item in items if item.ref_log_probs]
    if not log_probs:
        return None
    assert len(log_probs) == len(items), (
        "some preferences have reference log-probs and others have none"
    )
    return to_device(torch.tensor(log_probs, dtype=torch.float32), device)


def _told(name: str, responses: Responses, rewards: Tensor) -> Sums:
    """Return metrics of chosen or rejected responses."""
    count = float(len(rewards))
    return {
        f"{name}_reward_mean": (rewards.sum(), count),
        f"{name}_log_prob_mean": (responses.log_probs.detach().sum(), count),
        f"{name}_tokens_mean": (responses.num_tokens.sum(), count),
    }
