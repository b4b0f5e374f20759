"""Critic (a backbone with a value head) and the choice of its initial weights.

B responses, T response tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raypo.config import ConfigError, ModelSection, PolicyLoraSection, RewardWeights
from raypo.models.heads import Float32Linear
from raypo.models.loading import is_causal, load_backbone, load_reward_model, same_vocabulary
from raypo.models.lora import add_adapter
from raypo.models.model_folder import follow_umask
from raypo.models.packed_attention import hidden_states, state_size
from raypo.models.packing import pack_padded
from raypo.models.scores import has_score_head
from raypo.models.vision import freeze
from raypo.types import Experience

VALUE_HEAD_FILE = "value_head.safetensors"
"""File of the value head in a saved critic's folder."""


@dataclass(frozen=True)
class CriticStart:
    """Initial weights of a critic."""

    path: str
    reward_weight: float | None = None
    """Factor by which a reward model's score head is multiplied to initialise the value head. None
    means that the value head is that of a saved critic, or zero if `path` has no value head."""
    remark: str = ""
    """Reason for `reward_weight`, for messages."""


def critic_start(
    model: ModelSection, weights: RewardWeights, *, has_other_judges: bool, normalizes: bool
) -> CriticStart:
    """Choose what a critic starts from: `model.critic`, a usable reward model, or the policy.

    Without `model.critic` this is the first usable reward model, or the policy if no reward model
    is usable. A reward model is usable if it is a decoder with the policy's vocabulary. Encoders
    are excluded, because a value would depend on the very tokens for which it is the baseline.

    A response's return (before KL) contains the reward model's score times a weight. The model's
    score head times that weight is therefore a good initial value head. The critic still has to
    learn the contributions of other reward functions and models, and the effect of bounds on the
    scores. With normalised scores, the scale is not known yet, so the head starts at zero.

    Args:
        model: The model section.
        weights: Weights of the score's sources in the reward.
        has_other_judges: True if the score has sources besides reward models: episodes, a reward
            function, a judge or reward servers.
        normalizes: `ppo.shaping.normalize`.

    Raises:
        ConfigError: `model.critic` is an encoder.
    """
    if model.critic is not None:
        if not is_causal(model.critic):
            raise ConfigError(
                f"model.critic ({model.critic}): its attention sees later tokens, but a value "
                "must not depend on later tokens. Give a decoder, or remove model.critic."
            )
        return CriticStart(model.critic)
    entries = model.reward or ()
    for entry in entries:
        if not same_vocabulary(entry.path, model.policy) or not is_causal(entry.path):
            continue
        if normalizes:
            remark = (
                "times 0: ppo.shaping.normalize measures the scale of the scores during the run"
            )
            return CriticStart(entry.path, 0.0, remark)
        weight = weights.model * entry.weight
        is_alone = len(entries) == 1 and not has_other_judges
        remarks = [f"times {weight:g}"] if weight != 1.0 else []
        remarks += [] if is_alone else ["the other scores are learned"]
        return CriticStart(entry.path, weight, "; ".join(remarks))
    return CriticStart(model.policy)


class Critic(nn.Module):
    """Language model's backbone with a value head."""

    def __init__(self, backbone: Any) -> None:
        """Add a value head to a backbone. It starts at zero, so V = 0 before training."""
        super().__init__()
        self.backbone = backbone
        like = next(backbone.parameters())
        self.value_head = Float32Linear(state_size(backbone), 1, like=like)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    def load(
        cls,
        start: CriticStart,
        *,
        dtype: str,
        attention: str = "auto",
        lora: PolicyLoraSection | None = None,
        frozen: Sequence[str] = (),
    ) -> tuple[Self, str]:
        """Load a critic.

        Args:
            start: Initial weights.
            dtype: float32 or bfloat16.
            attention: `model.attention`.
            lora: If set, the backbone is frozen and the value head is trained. `lora.critic`
                decides if an adapter is trained too. None means that all weights are trained.
            frozen: `model.freeze`.

        Returns:
            The critic, and a description of its initial weights for messages.
        """
        critic, words = cls._load_whole(start, dtype=dtype, attention=attention)
        freeze(critic.backbone, frozen)
        if lora is None:
            return critic, words
        if lora.critic == "head":
            critic.backbone.requires_grad_(False)
            return critic, f"{words}; only the value head is trained"
        add_adapter(critic.backbone, lora)
        return critic, f"{words}; an adapter and the value head are trained"

    @classmethod
    def _load_whole(cls, start: CriticStart, **loaded: Any) -> tuple[Self, str]:
        if start.reward_weight is not None:
            model = load_reward_model(start.path, **loaded)
            if has_score_head(model):
                critic = cls(model.base_model)
                with torch.no_grad():
                    for name, parameter in model.score.named_parameters():
                        into = critic.value_head.get_parameter(name)
                        into.copy_(parameter * start.reward_weight)
                words = f"starts from the reward model {start.path}, score head included"
                return critic, f"{words} ({start.remark})" if start.remark else words
        critic = cls(load_backbone(start.path, **loaded))
        head = Path(start.path) / VALUE_HEAD_FILE
        if head.exists():
            critic._load_value_head(head)
            return critic, f"starts from the critic {start.path}, value head included"
        return critic, f"starts from {start.path}, with a value head of zeros"

    def _load_value_head(self, file: Path) -> None:
        weights, own = load_file(file), self.value_head.state_dict()
        actual, wanted = (
            ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
            for tensors in (weights, own)
        )
        if {n: t.shape for n, t in weights.items()} != {n: t.shape for n, t in own.items()}:
            raise ConfigError(
                f"model.critic ({file.parent}): {file.name} has {actual}, and a value head of this "
                f"backbone is {wanted}. Rename its tensors, or remove the file for a value head "
                f"that starts at zero."
            )
        self.value_head.load_state_dict(weights)

    def forward(self, batch: Experience, *, with_last: bool = False) -> Tensor:
        """Return values [B, T] float32 of the states before each response token, 0 on padding.

        Args:
            batch: The experience.
            with_last: Also return the value of the state after the last token: [B, T + 1].
        """
        packed = pack_padded(
            batch.prompt_ids,
            batch.prompt_mask,
            batch.response_ids,
            batch.attention_mask,
            with_last=with_last,
            device=batch.response_mask.device,
            images=batch.images,
        )
        values = self.value_head(hidden_states(self.backbone, packed)).squeeze(-1)
        return packed.unpacked(values.to(torch.float32))


def save_value_head(folder: Path, weights: dict[str, Tensor]) -> None:
    """Save a value head into its backbone's folder, where `Critic.load` finds it."""
    save_file(weights, folder / VALUE_HEAD_FILE)
    follow_umask(folder)
