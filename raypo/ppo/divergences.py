"""How far a student's next-token distribution is from a teacher's, token by token.

N tokens, V vocabulary, K tokens whose probability the teacher tells, V where it tells all.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


def divergences(
    logits: Tensor,  # [N, V] the student's
    teacher_log_probs: Tensor,  # [N, K]
    teacher_ids: Tensor,  # [N, K] int64, of the tokens that these are the log-probs of
    *,
    kind: Divergence,
    beta: float = 0.5,
    vocabulary: int | None = None,
) -> Tensor:
    """The divergence of each token's two distributions, differentiable.

    With K below the vocabulary all other tokens count as one event: a lower bound of the divergence
    of the whole distributions, zero where the K tokens' probabilities agree. What is among the rest
    is not learned.

    Args:
        kind: forward_kl: KL(teacher || student); reverse_kl: KL(student || teacher); jsd: with
            m = beta teacher + (1 - beta) student, beta KL(teacher || m) + (1 - beta) KL(student ||
            m).
        vocabulary: Only the first so many logits are of tokens, the others fill a matrix up; None:
            all are.

    Returns:
        [N] nats, float32, or float64 of float64 logits.

    Paper: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 1 and section 3.1.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    student = logits[:, :vocabulary].to(dtype).log_softmax(-1)  # [N, V]
    teacher = teacher_log_probs.to(dtype)
    told = student.gather(-1, teacher_ids)  # [N, K]
    if teacher.shape[-1] < student.shape[-1]:
        others = student.scatter(-1, teacher_ids, -math.inf).logsumexp(-1, keepdim=True)
        told = torch.cat([told, others], -1)
        teacher = torch.cat([teacher, _rest(teacher)], -1)
    least = torch.finfo(dtype).min
    told, teacher = told.clamp(min=least), teacher.clamp(min=least)  # 0 * -inf would be NaN
    if kind == "forward_kl":
        return _kl(teacher, told)
    if kind == "reverse_kl":
        return _kl(told, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), told + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(told, mixture)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


def _rest(log_probs: Tensor) -> Tensor:
    """[N, 1]: log-prob of all other events, down to what rounding leaves of them."""
    resolution = torch.finfo(torch.float32).eps  # the teacher told float32
    told = log_probs.exp().sum(-1, keepdim=True)
    return (1.0 - told).clamp(min=resolution).log()
