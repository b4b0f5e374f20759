"""Policy and critic as modules that return what PPO needs: [B, T] tensors aligned to responses.

B responses, T response tokens, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raypo.models.token_log_probs import response_hidden, response_log_probs
from raypo.types import Experience


class Policy(nn.Module):
    """A causal language model that returns the log-probs of given responses."""

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(
        self, batch: Experience, *, with_entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [B, T] float32 and entropies [B, T] of the tempered distribution, or None."""
        return response_log_probs(
            self.model,
            batch.prompt_ids,
            batch.prompt_mask,
            batch.response_ids,
            batch.attention_mask,
            temperature=self.temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )


class Critic(nn.Module):
    """A language model's backbone with a value head that starts at zero: V = 0 before training."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        parameter = next(backbone.parameters())
        self.value_head = nn.Linear(
            backbone.config.hidden_size, 1, dtype=parameter.dtype, device=parameter.device
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: Experience) -> Tensor:
        """Values [B, T] float32 of the states before each response token is chosen."""
        hidden = response_hidden(
            self.backbone,
            batch.prompt_ids,
            batch.prompt_mask,
            batch.response_ids,
            batch.attention_mask,
        )  # [B, T, H]
        return self.value_head(hidden).squeeze(-1).to(torch.float32)
