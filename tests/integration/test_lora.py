"""LoRA under real DeepSpeed at every ZeRO stage: what learns, what is pushed, what is kept."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.collectives import Workers
from raypo.config import ExamplesLearnerSection
from raypo.learner.learner import Learner
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import PairTask
from raypo.models.loading import load_reward_model
from raypo.models.lora import add_adapter
from raypo.types import Pair
from tests.integration.learning import (
    STAGES,
    experience,
    largest_difference,
    learner,
    save_state,
    weights,
    with_targets,
)

pytestmark = pytest.mark.usefixtures("group")
LORA = {"rank": 4, "alpha": 64.0}


def taught(model: str, *, stage: int, **lora: object) -> tuple[Learner, dict[str, float]]:
    """A learner after one step, and the step's figures."""
    learning = learner(model, stage=stage, lora={**LORA, **lora})
    batch = with_targets(learning.with_log_probs_and_values(experience()))
    return learning, learning.update(batch, step=1)[1].metrics


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_learns_the_adapter_alone_and_is_pushed_merged(
    model: str, stage: int, tmp_path: Path
):
    learning, figures = taught(model, stage=stage)
    evaluated = learning.with_log_probs_and_values(experience())
    base = AutoModelForCausalLM.from_pretrained(model)
    before = dict(base.named_parameters())
    pushed = weights(learning)
    assert pushed.keys() == before.keys()
    for name, weight in pushed.items():
        assert torch.equal(weight, before[name]) != ("proj" in name), name

    assert figures["ppo/skipped_updates"] == 0.0
    assert evaluated.ref_log_probs is not None
    untaught = learner(model, stage=stage, lora=LORA).with_log_probs_and_values(experience())
    assert untaught.old_log_probs is not None
    assert untaught.ref_log_probs is not None
    assert torch.equal(untaught.ref_log_probs, untaught.old_log_probs)
    assert torch.equal(evaluated.ref_log_probs, untaught.ref_log_probs)

    base.save_pretrained(tmp_path, state_dict=pushed)
    merged = learner(str(tmp_path), stage=stage)
    gap = (merged.log_probs(experience()) - learning.log_probs(experience())).abs().max()
    assert gap < 1e-4
    moved = (evaluated.old_log_probs - evaluated.ref_log_probs).abs().max()  # type: ignore[operator]
    assert moved > 0.01, "the adapter hardly moved: this test shows nothing"


def test_every_stage_makes_the_same_step(model: str):
    first, figures = taught(model, stage=0)
    for stage in STAGES[1:]:
        other, theirs = taught(model, stage=stage)
        assert largest_difference(weights(other), weights(first)) < 1e-3
        for name in ("ppo/policy_loss", "ppo/value_loss", "ppo/approx_kl"):
            assert theirs[name] == pytest.approx(figures[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("stage", STAGES)
def test_saved_and_restored_it_goes_on_bit_for_bit(model: str, stage: int, tmp_path: Path):
    learning, _ = taught(model, stage=stage)
    save_state(learning, tmp_path)
    batch = with_targets(learning.with_log_probs_and_values(experience()))
    _, expected = learning.update(batch, step=2)

    resumed = learner(model, stage=stage, lora=LORA)
    resumed.restore(tmp_path)
    assert (
        resumed.update(with_targets(resumed.with_log_probs_and_values(experience())), step=2)[1]
        == expected
    )
    assert largest_difference(weights(resumed), weights(learning)) == 0.0
    files = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    whole = sum(weight.nbytes for weight in weights(learning).values())
    assert files < 3 * whole, "the base is in the checkpoint, three times with its moments"


def test_in_bfloat16_the_merged_weights_are_rounded_once(model: str, tmp_path: Path):
    learning = learner(model, stage=2, lora=LORA, dtype="bfloat16")
    learning.update(with_targets(learning.with_log_probs_and_values(experience())), step=1)
    base = AutoModelForCausalLM.from_pretrained(model)
    base.save_pretrained(tmp_path, state_dict=weights(learning))
    merged = learner(str(tmp_path), stage=2, dtype="bfloat16")
    gap = (merged.log_probs(experience()) - learning.log_probs(experience())).abs()
    assert gap[experience().response_mask].mean() < 0.05


@pytest.mark.parametrize("stage", [0, 3])
def test_a_critic_that_learns_its_head_alone_keeps_its_backbone(model: str, stage: int):
    learning, _ = taught(model, stage=stage, critic="head")
    critic = learning._critic
    assert critic is not None
    backbone = dict(critic.named_weights(critic.module.backbone))
    base = dict(AutoModelForCausalLM.from_pretrained(model).model.named_parameters())
    assert all(torch.equal(weight, base[name]) for name, weight in backbone.items())
    head = dict(critic.named_weights(critic.module.value_head))
    assert head["weight"].abs().max() > 0.0


@pytest.mark.parametrize("stage", [0, 3])
def test_a_reward_model_learns_its_adapter_and_its_head(model: str, stage: int, tmp_path: Path):
    torch.manual_seed(0)
    section = ExamplesLearnerSection.model_validate({"lr": 1e-2, "zero_stage": stage})
    config = {"rank": 4}
    from raypo.config import LoraSection

    lora = LoraSection.model_validate(config)
    network = add_adapter(load_reward_model(model, dtype="float32", new_head=True), lora)
    head = network.score.weight.detach().clone()
    learning = SupervisedLearner(
        PairTask(network, centering_coef=0.0),
        section,
        dtype="float32",
        num_steps=4,
        workers=Workers(),
    )
    ids = [torch.tensor([5, 6, 2], dtype=torch.int32).numpy() for _ in range(3)]
    pair = Pair(ids[0], ids[1], torch.tensor([7, 2], dtype=torch.int32).numpy())
    figures = [learning.update([pair], step=step) for step in (1, 2, 3)]
    assert figures[2]["train/loss"] < figures[0]["train/loss"]
    pushed = weights(learning)  # type: ignore[arg-type]
    assert not torch.equal(pushed["score.weight"], head)
    learning.adapter_export(lora, model).save(tmp_path, Workers())
    assert (tmp_path / "adapter_model.safetensors").is_file()
