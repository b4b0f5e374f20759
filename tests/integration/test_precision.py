"""In bfloat16 as in float32 an update is that of float32 sums, master weights and heads."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from raypo.collectives import Workers
from raypo.config import WorkersSection
from raypo.learner.learner import Learner
from raypo.learner.state import write_tensors
from raypo.learner.trained_model import TrainedModel
from raypo.models.critic import Critic, CriticStart, save_value_head
from raypo.models.heads import Float32Linear
from raypo.models.linear import with_float32_logits
from raypo.models.loading import load_causal_lm
from raypo.models.networks import Policy
from tests.integration.learning import LR, STAGES, experience, learner, save_state, with_targets

pytestmark = pytest.mark.usefixtures("group")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PIECES, SMALL = 128, 2.0**-8
BETAS, EPS = (0.7, 0.95), 1e-3


class Sums(nn.Module):
    """Its loss is the sum of its weights times given numbers: those are the gradients."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 16, generator=generator).to(dtype))

    def forward(self, numbers: Tensor) -> Tensor:
        return (self.weight * numbers).sum()


def trained_model(
    module: nn.Module,
    stage: int,
    dtype: str,
    *,
    betas: tuple[float, float] = BETAS,
    eps: float = EPS,
) -> TrainedModel:
    section = WorkersSection.model_validate(
        {"zero_stage": stage, "max_grad_norm": 1e3, "adam_betas": betas, "adam_eps": eps}
    )
    trained = TrainedModel(module, dtype=dtype, section=section, workers=Workers())
    trained.set_learning_rate(LR)
    return trained


def master(of: TrainedModel, parameter: nn.Parameter, dtype: str) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    whole = dtype == "float32" and of._stage == 0
    found = parameter.detach() if whole else safe_get_full_fp32_param(parameter)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_updates_are_those_of_a_float32_adamw_on_the_sum_of_many_microbatches(
    stage: int, dtype: str
):
    """A gradient of 1 and 127 of 2 ** -8: a sum in bfloat16 would stay at 1. Then -0.25 and those:
    the second update depends on how large the two sums are.
    """
    module = Sums(DTYPES[dtype])
    reference = nn.Parameter(module.weight.detach().float().clone())
    trained = trained_model(module, stage, dtype)
    signs = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).sign()
    optimizer = torch.optim.AdamW([reference], lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)
    for first in (1.0, -0.25):
        for number in range(PIECES):
            scale = SMALL if number else first
            trained.backward(trained((signs * scale).to(DTYPES[dtype])))
        applied, norm = trained.step()
        assert applied

        reference.grad = signs * (first + (PIECES - 1) * SMALL)
        optimizer.step()
        if norm is not None:
            assert norm == pytest.approx(float(reference.grad.norm()), rel=1e-5)
        # An update is LR in size; float32 weights of up to 4 are known to 2e-7 each.
        now = master(trained, trained.module.weight, dtype)
        assert float((now - reference.detach()).abs().max()) < 1e-3 * LR


@pytest.mark.parametrize("stage", STAGES)
def test_the_constants_of_adamw_stay_the_configs_where_a_checkpoint_has_others(
    stage: int, tmp_path: Path
):
    """As when pbt goes on from another trial's state, or `from_checkpoint` with other values."""
    written = trained_model(Sums(torch.float32), stage, "float32", betas=(0.5, 0.6), eps=0.1)
    numbers = torch.ones(8, 16)
    written.backward(written(numbers))
    written.step()
    write_tensors(tmp_path / "state.pt", written.state())
    moved = []
    for constants in ({"betas": (0.5, 0.6), "eps": 0.1}, {}):
        trained = trained_model(Sums(torch.float32), stage, "float32", **constants)
        trained.load([tmp_path / "state.pt"])
        before = master(trained, trained.module.weight, "float32").clone()
        trained.backward(trained(-numbers))
        trained.step()
        moved.append(master(trained, trained.module.weight, "float32") - before)
    first, second = (0.5, 0.6, 0.1), (*BETAS, EPS)
    for (beta_1, beta_2, eps), change in zip((first, second), moved, strict=True):
        mean = (beta_1 * (1 - 0.5) - (1 - beta_1)) / (1 - beta_1**2)
        square = (beta_2 * (1 - 0.6) + (1 - beta_2)) / (1 - beta_2**2)
        expected = torch.full_like(change, -LR * mean / (square**0.5 + eps))
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-6)


def values_of(of: Learner) -> Tensor:
    values = of.with_log_probs_and_values(experience()).values
    assert values is not None
    return values


@pytest.mark.parametrize("stage", STAGES)
def test_a_value_head_is_float32_through_updates_checkpoints_and_folders(
    model: str,
    stage: int,
    tmp_path: Path,
):
    """The bias starts at 10.03, which bfloat16 has as 10.0."""
    start = tmp_path / "start"
    critic, _ = Critic.load(CriticStart(model), dtype="bfloat16")
    critic.value_head.bias.data.fill_(10.03)
    critic.backbone.save_pretrained(start)
    AutoTokenizer.from_pretrained(model).save_pretrained(start)
    save_value_head(start, critic.value_head.state_dict())

    trained = learner(model, stage=stage, dtype="bfloat16", critic=str(start))
    mask = experience().response_mask
    first = values_of(trained)[mask]
    torch.testing.assert_close(first, torch.full_like(first, 10.03), rtol=1e-6, atol=0.0)

    batch = with_targets(trained.with_log_probs_and_values(experience()))
    trained.update(batch, step=1)
    values = values_of(trained)
    assert len(values[mask].unique()) > 0.9 * mask.sum()  # bfloat16 knows steps of 1 / 16

    (tmp_path / "checkpoint").mkdir()
    save_state(trained, tmp_path / "checkpoint")
    resumed = learner(model, stage=stage, dtype="bfloat16", critic=str(start))
    resumed.restore(tmp_path / "checkpoint")
    assert torch.equal(values_of(resumed), values)

    export = trained.critic_export(AutoTokenizer.from_pretrained(model))
    export.save(tmp_path / "folder", Workers())
    loaded, _ = Critic.load(CriticStart(str(tmp_path / "folder")), dtype="bfloat16")
    assert loaded.value_head.weight.dtype == torch.float32
    assert isinstance(loaded.value_head, Float32Linear)
    torch.testing.assert_close(torch.where(mask, loaded(batch), 0.0), values, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_head_in_float32_trains_at_every_stage_and_pushes_bfloat16(stage: int, model: str):
    """Its log-probs are those of one model alone; those of a head in bfloat16 are rounded."""
    batch = experience()
    alone = with_float32_logits(load_causal_lm(model, dtype="bfloat16"))
    with torch.no_grad():
        expected = Policy(alone, temperature=1.0)(batch)[0]
    trained, rounded = (
        learner(model, stage=stage, dtype="bfloat16", head_dtype=head)
        for head in ("float32", "model")
    )
    before = dict(trained.named_weights())
    assert {weight.dtype for weight in before.values()} == {torch.bfloat16}
    before = {name: weight.clone() for name, weight in before.items()}

    log_probs, others = trained.log_probs(batch), rounded.log_probs(batch)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-6)
    assert float((others - expected).abs().max()) > 1e-4
    ready = with_targets(trained.with_log_probs_and_values(batch))
    _, statistics = trained.update(ready, step=1)
    assert statistics.metrics["ppo/skipped_updates"] == 0
    changed = [name for name, w in trained.named_weights() if not torch.equal(w, before[name])]
    assert any("embed_tokens" in name or "lm_head" in name for name in changed)
