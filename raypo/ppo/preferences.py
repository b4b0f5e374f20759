"""Losses of preference optimisation: what a policy learns from pairs, or from single verdicts.

B pairs or responses. Log-probs are sums over a response's tokens, nats. All losses are one number a
row, not yet averaged.
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
    """One response to each of B prompts, as the policy and the reference see it."""

    log_probs: Tensor  # [B] float, of the policy
    num_tokens: Tensor  # [B] float, the end included; at least 1
    ref_log_probs: Tensor | None = None  # [B] float, of the reference; None: there is none

    @property
    def log_ratios(self) -> Tensor:
        """log policy / reference, [B]; without a reference log policy."""
        return self.log_probs if self.ref_log_probs is None else self.log_probs - self.ref_log_probs

    def rewards(self, beta: float, *, per_token: bool = False) -> Tensor:
        """The implicit reward beta * log policy / reference, [B]; per token its mean over tokens.

        Paper: Rafailov et al. 2023, arXiv:2305.18290, eq. 5, without the part of the prompt alone.
        """
        ratios = self.log_ratios
        return beta * (ratios / self.num_tokens if per_token else ratios)


def is_per_token(kind: str) -> bool:
    """Whether a loss compares mean log-probs, so that a long response is no other than a short."""
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
    """Loss of each pair, [B].

    With z the rewards' difference, r(chosen) - r(rejected) - margin, and e the label smoothing:

    - sigmoid: -(1 - e) log sigmoid(z) - e log sigmoid(-z). DPO, Rafailov et al. 2023,
      arXiv:2305.18290, eq. 7; e: the conservative DPO of Mitchell 2023; the margin: DPO with an
      offset, Amini et al. 2024, arXiv:2402.10571.
    - sigmoid_norm: the same of rewards per token. Lambert et al. 2024 (Tulu 3), arXiv:2411.15124.
    - robust: (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e), unbiased where a share e of
      the pairs is swapped. Chowdhury et al. 2024, arXiv:2403.00409.
    - hinge: max(0, 1 - z). Zhao et al. 2023 (SLiC-HF), arXiv:2305.10425.
    - ipo: (h - 1 / (2 beta))^2, h the difference of the log-ratios per token, which no longer
      depends on lengths. Azar et al. 2023, arXiv:2310.12036, eq. 17.
    - simpo: sigmoid of rewards per token without a reference, less simpo_gamma. Meng et al. 2024,
      arXiv:2405.14734, eq. 6.

    Args:
        label_smoothing: Share of pairs that is taken to be swapped; of sigmoid, sigmoid_norm,
            robust and simpo. Below 0.5.
        simpo_gamma: Least difference of the rewards that simpo asks for.
        margins: By how much each chosen response is better, in units of the rewards; not of ipo.
    """
    per_token = is_per_token(kind)
    gap = chosen.rewards(beta, per_token=per_token) - rejected.rewards(beta, per_token=per_token)
    if kind == "ipo":
        return (gap - 0.5).square() / beta**2
    z = gap - margins - (simpo_gamma if kind == "simpo" else 0.0)
    if kind == "hinge":
        return relu(1.0 - z)
    right, swapped = -logsigmoid(z), -logsigmoid(-z)
    if kind == "robust":
        kept = (1.0 - label_smoothing) * right - label_smoothing * swapped
        return kept / (1.0 - 2.0 * label_smoothing)
    return (1.0 - label_smoothing) * right + label_smoothing * swapped


def kto_losses(
    responses: Responses,
    is_desirable: Tensor,  # [B] bool
    *,
    beta: float,
    kl: Tensor | float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Loss of each response that was called desirable or not, [B].

    weight * (1 - sigmoid(z)), z = beta * (log-ratio - kl) of a desirable response and its negative
    of an undesirable one.

    Args:
        kl: The reference point, KL of policy and reference in nats per response (`kto_kl`); no
            gradient flows through it.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
    """
    z = beta * (responses.log_ratios - kl)
    kept = 1.0 - torch.sigmoid(torch.where(is_desirable, z, -z))
    return torch.where(is_desirable, desirable_weight, undesirable_weight) * kept


def kto_kl(total: float, count: float) -> float:
    """KTO's reference point from prompts with responses that belong to other prompts.

    Args:
        total: Sum of their log-ratios over a whole batch, of all workers.
        count: How many they are.

    Returns:
        Their mean, but not below 0, nats per response.

    Paper: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
    """
    return max(0.0, total / count) if count else 0.0
