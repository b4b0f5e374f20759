"""Divergences between a student's and a teacher's next-token distributions, token by token.

Notation: N tokens, V vocabulary, K tokens with known teacher probability (V if all are known).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]


def divergences(
    logits: Tensor,  # [N, V], of the student
    teacher_log_probs: Tensor,  # [N, K]
    teacher_ids: Tensor,  # [N, K] int64
    *,
    kind: Divergence,
    beta: float = 0.5,
    vocabulary: int | None = None,
) -> Tensor:
    """Return the divergence between teacher and student at each token, differentiable.

    - forward_kl: KL(teacher || student).
    - reverse_kl: KL(student || teacher).
    - jsd: beta KL(teacher || m) + (1 - beta) KL(student || m), with
      m = beta teacher + (1 - beta) student.

    If K is smaller than the vocabulary, all other tokens count as one event. The result is then a
    lower bound of the full divergence. It is 0 if the probabilities of the K tokens agree, so the
    student does not learn how the remaining probability is distributed.

    Args:
        logits: Logits of the student.
        teacher_log_probs: Log-probs of the teacher.
        teacher_ids: Ids of the tokens that `teacher_log_probs` belong to.
        kind: Kind of the divergence.
        beta: Weight of the teacher, for jsd.
        vocabulary: Number of logits that belong to tokens; the rest is padding. None means that no
            logit is padding.

    Returns:
        divergences: [N] in nats, float32, or float64 if the logits are float64.

    Paper: Agarwal et al. 2023 (GKD), arXiv:2306.13649, eq. 1 and section 3.1.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    student = logits[:, :vocabulary].to(dtype).log_softmax(-1)  # [N, V]
    teacher = teacher_log_probs.to(dtype)
    student_log_probs = student.gather(-1, teacher_ids)  # [N, K]
    if teacher.shape[-1] < student.shape[-1]:
        other_log_prob = student.scatter(-1, teacher_ids, -math.inf).logsumexp(-1, keepdim=True)
        student_log_probs = torch.cat([student_log_probs, other_log_prob], -1)
        teacher = torch.cat([teacher, _remaining_log_prob(teacher)], -1)
    min_log_prob = torch.finfo(dtype).min
    student_log_probs, teacher = (
        student_log_probs.clamp(min=min_log_prob),
        teacher.clamp(min=min_log_prob),
    )  # 0 * -inf would be NaN
    if kind == "forward_kl":
        return _kl(teacher, student_log_probs)
    if kind == "reverse_kl":
        return _kl(student_log_probs, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student_log_probs + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student_log_probs, mixture)


def _kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)


def _remaining_log_prob(log_probs: Tensor) -> Tensor:
    """Return the total log-prob of all other tokens, [N, 1], at least log(float32 epsilon)."""
    resolution = torch.finfo(torch.float32).eps  # the teacher's log-probs are float32
    probability = log_probs.exp().sum(-1, keepdim=True)
    return (1.0 - probability).clamp(min=resolution).log()
