"""Formulas by head, and against what torch and the code's own constants say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raypo.config import LearnerSection, LoraSection, PPOConfig
from raypo.learner.deepspeed_config import Sharding, deepspeed_config
from raypo.models.chunk_sizes import CHUNK_ELEMENTS
from raypo.models.loading import load_causal_lm
from raypo.models.lora import add_adapter
from raypo.models.model_shape import Models, ModelShape
from raypo.models.packed_attention import hidden_states
from raypo.models.packing import pack
from raypo.plan.estimate import adapter_weights, roles_of
from raypo.plan.memory import Batch, activations, logits, trained, worst_batch
from tests.tiny import tiny_policy

N = 1_000


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def test_stage_0_in_float32_takes_sixteen_bytes_a_weight():
    held, _, host = trained(N, 100, Sharding(0), itemsize=4)
    assert total(held) == 16 * N
    assert host == {}


def test_master_weights_and_moments_are_shared_out_from_stage_1():
    held, _, _ = trained(N, 100, Sharding(1, workers=4), itemsize=2)
    assert held["weights"] == 2 * N
    assert held["optimizer"] == 12 * N // 4
    assert held["gradients"] == (4 + 2) * N  # a float32 sum on every worker, and a micro-batch's


def test_gradients_from_stage_2_and_weights_at_stage_3():
    second, _, _ = trained(N, 100, Sharding(2, workers=4), itemsize=2)
    third, update, _ = trained(N, 100, Sharding(3, workers=4), itemsize=2)
    assert second["gradients"] == third["gradients"] == 4 * N // 4
    assert (second["weights"], third["weights"]) == (2 * N, 2 * N // 4)
    assert update["gathered weights"] == 2 * N


def test_muon_has_one_moment_from_stage_2_in_the_dtype_of_the_weights():
    whole, _, _ = trained(N, 100, Sharding(0), itemsize=4, matrices=800)
    assert whole["optimizer"] == 800 * 4 + 200 * 8
    for stage, moment in ((1, 4), (2, 2), (3, 2)):
        held, _, _ = trained(N, 100, Sharding(stage, workers=4), itemsize=2, matrices=800)
        assert held["optimizer"] == (N * 4 + 800 * moment + 200 * 8) // 4


def test_what_is_off_loaded_lies_in_ram():
    held, _, host = trained(N, 100, Sharding(3, 4, True, True), itemsize=2)
    assert host["optimizer"] == 12 * N // 4
    assert host["weights"] == 2 * N // 4
    assert "weights" not in held
    assert "optimizer" not in held


def test_a_bucket_is_no_larger_than_the_model_or_its_key():
    held, _, _ = trained(N, 100, Sharding(2), itemsize=2)
    assert held["buckets"] == 2 * N
    held, _, _ = trained(N, 100, Sharding(2, reduce_bucket=10), itemsize=2)
    assert held["buckets"] == 20


def test_gradients_are_summed_meanwhile_on_gpus_which_takes_a_second_bucket_at_stage_2():
    section = LearnerSection(zero_stage=2)
    held = {}
    for on_gpu in (False, True):
        sharding = Sharding.of(section, dtype="bfloat16", num_workers=4, on_gpu=on_gpu)
        assert sharding.overlaps is on_gpu
        held[on_gpu], _, _ = trained(N, 100, sharding, itemsize=2)
    assert held[True].pop("buckets") == 2 * held[False].pop("buckets") == 4 * N
    assert held[True] == held[False]


def test_a_worker_alone_has_one_bucket_on_a_gpu_too_whatever_the_user_left_out():
    told = {"zero_optimization": {"stage": 2, "overlap_comm": None}}
    section = LearnerSection.model_validate({"zero_stage": 2, "deepspeed": told})
    alone = Sharding.of(section, dtype="bfloat16", num_workers=1, on_gpu=True)
    assert (alone.stage, alone.overlaps) == (2, False)
    assert replace(alone, stage=3).overlaps  # or each fetch of weights waits for all computation
    on = {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    section = LearnerSection.model_validate({"deepspeed": on})
    assert Sharding.of(section, dtype="bfloat16", num_workers=1).overlaps


def test_the_deepspeed_key_wins_over_the_stage():
    section = LearnerSection.model_validate(
        {"zero_stage": 1, "deepspeed": {"zero_optimization": {"stage": 3}}}
    )
    generated = deepspeed_config(section, dtype="float32", num_workers=2)["zero_optimization"]
    assert generated["stage"] == 3
    assert Sharding.of(section, dtype="float32", num_workers=2).stage == 3
    off = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    section = LearnerSection.model_validate({"zero_stage": 2, "deepspeed": off})
    off_loaded = Sharding(2, 2, offload_optimizer=True)
    assert Sharding.of(section, dtype="float32", num_workers=2) == off_loaded


@pytest.mark.parametrize(
    ("keys", "dtype", "workers", "stage"),
    [
        ({"zero_stage": 2}, "float32", 1, 0),
        ({"zero_stage": 1}, "float32", 1, 0),
        ({"zero_stage": 3}, "float32", 1, 3),
        ({"zero_stage": 2}, "float32", 2, 2),
        ({"zero_stage": 2}, "bfloat16", 1, 1),
        ({"zero_stage": 2}, "bfloat16", 2, 2),
        ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": 10}}}, "float32", 1, 2),
    ],
)
def test_a_worker_alone_shards_nothing(keys: dict, dtype: str, workers: int, stage: int):
    section = LearnerSection.model_validate(keys)
    config = deepspeed_config(section, dtype=dtype, num_workers=workers)
    assert config["zero_optimization"]["stage"] == stage
    assert Sharding.of(section, dtype=dtype, num_workers=workers).stage == stage


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 0), ("bfloat16", 1)])
@pytest.mark.parametrize(
    "keys", [{"zero_stage": 0}, {"deepspeed": {"zero_optimization": {"stage": 0}}}]
)
def test_stage_0_is_deepspeeds_stage_1_in_bfloat16(dtype: str, stage: int, keys: dict):
    section = LearnerSection.model_validate(keys)
    config = deepspeed_config(section, dtype=dtype, num_workers=1)
    assert config["zero_optimization"]["stage"] == stage
    assert Sharding.of(section, dtype=dtype, num_workers=1).stage == stage
    assert config.get("communication_data_type") == ("fp32" if stage == 1 else None)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_saved_activations_are_what_autograd_saves(
    tmp_path: Path, samples: int, checkpointing: bool
):
    """Every tensor that torch keeps for the backward pass, weights aside, counted once.

    With checkpointing: layers keep their inputs, and one of them is computed anew at a time.
    """
    folder = tiny_policy(tmp_path, hidden=64, layers=4)
    model = load_causal_lm(str(folder), dtype="float32")
    shape = ModelShape.read(str(folder))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = Batch(2, samples, prompt_tokens=64, tokens=2 * (64 + samples * 32))
    ids = np.arange(200) % 80
    prompts = [ids[n : n + 64] for n in range(2) for _ in range(samples)]
    responses = [ids[n : n + 33] for n in range(2 * samples)]
    packed = pack(prompts, responses)
    one_layer = 0
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        whole, layers = activations(shape, batch, itemsize=4, device="cpu"), shape.layers
        last = 12 * shape.hidden * batch.tokens  # of the norm after the layers
        one_layer = (whole - last) // layers
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(model.model, packed)

    keys = {"itemsize": 4, "device": "cpu", "checkpointing": checkpointing}
    predicted = activations(shape, batch, **keys) - one_layer
    # The output of the last norm is kept by the head, which is not here; it counts among few.
    assert predicted == pytest.approx(sum(saved.values()), rel=0.2 if checkpointing else 0.05)


def test_the_worst_batch_is_within_the_budget_and_has_the_rows_there_are():
    limits = {"prompt_tokens": 60, "response_tokens": 40}
    batch = worst_batch(max_tokens=1_000, max_rows=100, samples=8, **limits)
    assert (batch.prompts, batch.responses, batch.tokens) == (3, 8, 1_000)
    part = worst_batch(max_tokens=300, max_rows=100, samples=8, **limits)
    assert (part.prompts, part.responses, part.tokens) == (1, 6, 300)
    few = worst_batch(max_tokens=1_000, max_rows=3, samples=8, **limits)
    assert (few.prompts, few.responses, few.tokens) == (1, 3, 180)
    assert worst_batch(max_tokens=1_000, max_rows=100, samples=1, **limits).tokens == 1_000
    assert worst_batch(max_tokens=150, max_rows=9, samples=1, **limits).tokens == 150


def test_frozen_weights_have_no_moments_and_are_sharded_at_stage_3():
    held, _, _ = trained(N, 100, Sharding(0), itemsize=4, frozen=9 * N)
    assert held["weights"] == 4 * 10 * N
    assert held["optimizer"] + held["gradients"] == 12 * N
    held, update, _ = trained(N, 100, Sharding(3, workers=4), itemsize=2, frozen=9 * N)
    assert held["weights"] == 2 * 10 * N // 4
    assert update["gathered weights"] == 2 * 10 * N


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_an_adapter_has_the_weights_that_peft_gives_it(tmp_path: Path, targets: Any):
    shape = ModelShape.read(str(tiny_policy(tmp_path)))
    section = LoraSection(rank=4, target_modules=targets)
    model = add_adapter(load_causal_lm(str(tmp_path), dtype="float32"), section)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_weights(section, shape) == learning


def test_a_run_with_muon_holds_one_moment_of_the_linear_layers(tmp_path: Path):
    folder = str(tiny_policy(tmp_path))
    values = {"name": "run", "data": {"prompts": "prompts.jsonl"}}
    values |= {"model": {"policy": folder, "dtype": "float32"}}

    def optimizer(name: str) -> int:
        run = PPOConfig.parse(values | {"learner": {"optimizer": name}})
        held = roles_of(run, Models.read(run), Sharding(2), "cpu", None)[0].memory.held
        return held["policy optimizer"]

    modules = load_causal_lm(folder, dtype="float32").base_model.modules()
    linear = sum(m.weight.numel() for m in modules if isinstance(m, torch.nn.Linear))
    assert optimizer("adamw") - optimizer("muon") == 4 * linear


def test_lora_takes_the_optimizer_and_the_reference_out_of_the_plan(tmp_path: Path):
    folder = str(tiny_policy(tmp_path))
    values = {"name": "run", "data": {"prompts": "prompts.jsonl"}}
    model = {"policy": folder, "dtype": "float32"}
    whole = PPOConfig.parse(values | {"model": model})
    lora = PPOConfig.parse(values | {"model": {**model, "lora": {"rank": 2}}})
    assert list(Models.read(whole).references) == ["reference"]
    assert Models.read(lora).references == {}

    def learner(run: PPOConfig) -> dict[str, int]:
        return roles_of(run, Models.read(run), Sharding(2), "cpu", None)[0].memory.held

    full = learner(whole)
    small = learner(lora)
    assert small["policy optimizer"] < full["policy optimizer"] / 5
    assert small["policy weights"] > full["policy weights"]


@pytest.mark.parametrize(("device", "made", "scratch"), [("cpu", 24, 19), ("cuda", 28, 24)])
def test_logits_take_a_chunk_float32_scratch_of_a_part_and_the_heads_gradient(
    tmp_path: Path, device: str, made: int, scratch: int
):
    shape = replace(ModelShape.read(str(tiny_policy(tmp_path))), vocabulary=1 << 17)
    many = Batch(1, 1, 1, 1 << 14)
    kind: Any = {"itemsize": 2, "device": device}
    head = shape.vocabulary * shape.hidden
    frozen = 2 * (1 << made) + 3 * 4 * (1 << scratch)
    assert logits(shape, many, **kind, learns=False) == frozen
    product = 2 * head if device == "cpu" else 0  # a GPU adds it to the float32 sum in one kernel
    beside = 4 * head + max(3 * 4 * (1 << scratch), product)
    assert logits(shape, many, **kind, learns=True) == 2 * (1 << made) + beside
    copied = 4 * head if device == "cpu" else 0  # of the head's weight, once more as the product
    exact = (2 + 4) * (1 << made) + copied
    assert logits(shape, many, **kind, learns=False, head_in_float32=True) == (
        exact + 3 * 4 * (1 << scratch)
    )
    assert logits(shape, many, **kind, learns=True, head_in_float32=True) == (
        exact + 4 * head + max(3 * 4 * (1 << scratch), copied)
    )
    divergence = logits(shape, many, **kind, learns=True, of_divergence=True)
    assert divergence == (2 * 2 + 3 * 4) * CHUNK_ELEMENTS[device]
    assert logits(shape, Batch(1, 1, 1, 1), **kind, learns=False) == (2 + 3 * 4) * (1 << 17)
