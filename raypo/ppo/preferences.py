"""Losses of preference optimisation, on pairs or on single responses.

Notation: B pairs or responses. Log-probs are sums over a response's tokens, in nats. Losses are one
number per row, not averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

PairLoss = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "simpo"]


@dataclass(frozen=True)
class Responses:
    """One response to each of B prompts, with log-probs of the policy and the reference model."""

    log_probs: Tensor  # [B] float, of the policy
    num_tokens: Tensor  # [B] float, with the end of sequence; at least 1
    ref_log_probs: Tensor | None = None  # [B] float, of the reference model, if there is one

    @property
    def log_ratios(self) -> Tensor:
        """Log(policy / reference model), or log(policy) if there is no reference model, [B]."""
        return self.log_probs if self.ref_log_probs is None else self.log_probs - self.ref_log_probs

    def rewards(self, beta: float, *, per_token: bool = False) -> Tensor:
        """Return the implicit reward beta * log(policy / reference), [B].

        Args:
            beta: Scale of the reward.
            per_token: True divides the log-ratio by the number of tokens.

        Paper: Rafailov et al. 2023, arXiv:2305.18290, eq. 5, without the term that
            depends only on the prompt.
        """
        ratios = self.log_ratios
        return beta * (ratios / self.num_tokens if per_token else ratios)


def is_per_token(kind: str) -> bool:
    """Return True if a loss uses mean log-probs per token, so that length does not matter."""
    return kind in ("sigmoid_norm", "ipo", "simpo")


def pair_losses(
    chosen: Responses,
    rejected: Responses,
    *,
    kind: PairLoss,
    beta: float,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.0,
    margins: Tensor | float = 0.0,  # [B]
) -> Tensor:
    """Return the loss of each pair, [B].

    With the rewards r (`Responses.rewards`), z = r(chosen) - r(rejected) - margin, and label
    smoothing e:

    - sigmoid: -(1 - e) log sigmoid(z) - e log sigmoid(-z). DPO: Rafailov et al. 2023,
      arXiv:2305.18290, eq. 7. Label smoothing: conservative DPO, Mitchell 2023. Margin: DPO with an
      offset, Amini et al. 2024, arXiv:2402.10571.
    - sigmoid_norm: the same with rewards per token. Lambert et al. 2024 (Tulu 3), arXiv:2411.15124.
    - robust: (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e), unbiased if a share e of
      the pairs is swapped. Chowdhury et al. 2024, arXiv:2403.00409.
    - hinge: max(0, 1 - z). Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425.
    - ipo: (h - 1 / (2 beta))^2, where h is the difference of log-ratios per token. So h does not
      depend on lengths. Azar et al. 2023, arXiv:2310.12036, eq. 17.
    - simpo: sigmoid with rewards per token and without a reference model; simpo_gamma is subtracted
      from z. Meng et al. 2024, arXiv:2405.14734, eq. 6.

    Args:
        chosen: The preferred responses.
        rejected: The other responses.
        kind: Name of the loss.
        beta: Scale of the rewards.
        label_smoothing: Assumed share of swapped pairs, below 0.5, for sigmoid, sigmoid_norm,
            robust and simpo.
        simpo_gamma: Target difference of the rewards, for simpo.
        margins: Offset of each pair in units of the rewards, [B] or one number. Not for ipo.
    """
    per_token = is_per_token(kind)
    gap = chosen.rewards(beta, per_token=per_token) - rejected.rewards(beta, per_token=per_token)
    if kind == "ipo":
        return (gap - 0.5).square() / beta**2
    z = gap - margins - (simpo_gamma if kind == "simpo" else 0.0)
    if kind == "hinge":
        return relu(1.0 - z)
    correct, swapped = -logsigmoid(z), -logsigmoid(-z)
    if kind == "robust":
        loss = (1.0 - label_smoothing) * correct - label_smoothing * swapped
        return loss / (1.0 - 2.0 * label_smoothing)
    return (1.0 - label_smoothing) * correct + label_smoothing * swapped


def kto_losses(
    responses: Responses,
    is_desirable: Tensor,  # [B] bool
    *,
    beta: float,
    kl: Tensor | float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the KTO loss of each response, [B].

    The loss is weight * (1 - sigmoid(z)). z is beta * (log-ratio - kl) for desirable responses, and
    beta * (kl - log-ratio) for undesirable responses.

    Args:
        responses: The responses.
        is_desirable: True for desirable responses, False for undesirable ones.
        beta: Scale of the log-ratios.
        kl: Reference point (`kto_kl`): KL of policy and reference in nats per response, without
            gradient.
        desirable_weight: Weight of desirable responses.
        undesirable_weight: Weight of undesirable responses.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
    """
    z = beta * (responses.log_ratios - kl)
    loss = 1.0 - torch.sigmoid(torch.where(is_desirable, z, -z))
    return torch.where(is_desirable, desirable_weight, undesirable_weight) * loss


def kto_kl(total: float, count: float) -> float:
    """Return KTO's reference point, from prompts paired with responses to other prompts.

    Args:
        total: Sum of the log-ratios of such pairs, over the whole batch of all workers.
        count: Number of such pairs.

    Returns:
        The mean log-ratio in nats per response, at least 0. It is 0 if there are no such pairs.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
    """
    return max(0.0, total / count) if count else 0.0
