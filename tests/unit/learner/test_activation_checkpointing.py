"""`learner.activation_checkpointing`: less is kept, and the gradients stay."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raypo.config import ModelSection, PolicyLoraSection
from raypo.learner.trained_model import outermost_networks
from raypo.models import activation_memory
from raypo.models.activation_memory import checkpoint_layers, tile_mlps
from raypo.models.critic import Critic
from raypo.models.loading import load_backbone, load_causal_lm
from raypo.models.lora import load_policy
from raypo.models.networks import Policy
from raypo.models.packing import pack
from raypo.models.token_log_probs import packed_log_probs
from tests.tiny import tiny_policy

ROWS = [np.arange(5, 25)] * 3, [np.arange(30, 50), np.arange(40, 45), np.arange(9, 20)]


def gradients_and_saved(model: nn.Module) -> tuple[list[Tensor], int]:
    """Of the summed log-probs of `ROWS`, and the bytes that were kept for them."""
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = packed_log_probs(model, pack(*ROWS), temperature=1.0, with_entropy=True)
    model.zero_grad()
    log_probs.sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], sum(saved.values())


def test_gradients_are_the_same_of_a_fraction_of_the_memory(tmp_path: Path):
    model = load_causal_lm(str(tiny_policy(tmp_path, layers=4)), dtype="float32")
    gradients, whole = gradients_and_saved(model)
    for network in outermost_networks(Policy(model, temperature=1.0)):
        network.gradient_checkpointing_enable({"use_reentrant": False})
    again, kept = gradients_and_saved(model)

    assert kept < whole / 2
    for mine, theirs in zip(again, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_layer_inputs_on_the_host_and_mlps_in_tiles_give_the_same_gradients(tmp_path: Path):
    """Rows of 20 + 33 tokens in tiles of 16; one of them with an adapter."""
    for lora in (None, PolicyLoraSection(rank=4)):
        section = ModelSection(
            policy=str(tiny_policy(tmp_path, layers=4)), dtype="float32", lora=lora
        )
        torch.manual_seed(0)
        model = load_policy(section)
        gradients, whole = gradients_and_saved(model)
        assert tile_mlps(model, 16) == 4
        tiled, kept = gradients_and_saved(model)
        assert kept < whole
        checkpoint_layers(model, on_host=True)
        on_host, device_bytes = gradients_and_saved(model)
        assert device_bytes < kept / 2
        for mine, also, theirs in zip(tiled, on_host, gradients, strict=True):
            torch.testing.assert_close(mine, theirs)
            torch.testing.assert_close(also, theirs)


def test_layer_inputs_leave_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Hooks see all tensors that are saved for the backward pass: here the hidden states alone."""
    moved: list[torch.Size] = []

    def to_host(**_: object) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: moved.append(tensor.shape) or tensor, lambda t: t)

    monkeypatch.setattr(activation_memory, "save_on_cpu", to_host)
    model = load_causal_lm(str(tiny_policy(tmp_path, layers=4)), dtype="float32")
    checkpoint_layers(model, on_host=True)
    gradients_and_saved(model)
    assert [shape[-1] for shape in moved if len(shape) == 3] == [64] * 4


def test_the_networks_of_policy_and_critic_are_found_whole(tmp_path: Path):
    folder = str(tiny_policy(tmp_path))
    policy, backbone = (
        load_causal_lm(folder, dtype="float32"),
        load_backbone(folder, dtype="float32"),
    )
    assert outermost_networks(Policy(policy, temperature=1.0)) == [policy]
    assert outermost_networks(Critic(backbone)) == [backbone]
