"""A roofline of a step: hand-computed phases, what scales with what, and the key that helps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypo.cluster.hardware import parse_cluster
from raypo.config import PPOConfig
from raypo.plan.fit import Plan, make_plan
from raypo.plan.tables import times
from raypo.plan.times import (
    OPTIMIZER_BYTES,
    PhaseTime,
    Rates,
    StepTime,
    faster,
    step_time,
    updates_note,
)
from tests.unit.plan.test_plan import LLAMA_8B

ONE = Rates(
    flops=1e12,
    memory=1e10,
    link=1e9,
    host=1e9,
    half_width=0,
    engine_kernels_s=0.0,
    engine_launches_s=0.0,
    token_s=0.0,
    store=1e9,
    push_s=0.0,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def plan(folder: Path, cluster: str, **sections: dict[str, Any]) -> Plan:
    values: dict[str, Any] = {
        "name": "run",
        "model": {"policy": str(folder)},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 512},
        "rollout": {"prompts_per_step": 64, "samples_per_prompt": 4, "max_new_tokens": 512},
        "ppo": {"minibatch_size": 64},
        "learner": {"num_workers": 8, "zero_stage": 3, "max_tokens_per_microbatch": 4096},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return make_plan(PPOConfig.parse(values), parse_cluster(cluster))


def phases(made: Plan, rates: Rates = ONE) -> dict[str, PhaseTime]:
    return {each.phase: each for each in step_time(made, rates).phases}


def test_an_update_is_three_passes_over_the_workers(folder: Path):
    made = plan(folder, "8xH100", ppo={"advantage": "grpo", "kl": {"coef": 0.0}})
    update = phases(made)["update"]
    shape = made.models.policy
    weights = shape.parameters - shape.vocabulary * shape.hidden  # embeddings multiply nothing
    tokens = 256 * 512 + 64 * 512  # a prompt of four responses is read once
    head = shape.vocabulary * shape.hidden
    norms = (2 * shape.layers + 1) * shape.hidden
    products = 2 * ((weights - head - norms) * tokens + head * 256 * 512)
    pairs = 256 * 1024**2 - 192 * 512**2
    expected = 3 * (products + 4 * shape.layers * shape.attention * pairs) / 8 / ONE.flops
    assert update.beside["arithmetic"] == pytest.approx(expected)
    share = shape.parameters / 8
    assert update.after["optimizer"] == pytest.approx(4 * OPTIMIZER_BYTES * share / ONE.memory)


def test_balancing_experts_takes_another_forward_pass_of_the_policy(folder: Path):
    """A pass gathers all weights once more at stage 3."""
    sections: dict[str, Any] = {"advantage": "gae", "kl": {"coef": 0.0}}
    usual = plan(folder, "8xH100", ppo=sections)
    more = plan(folder, "8xH100", ppo=sections, learner={"router_aux_coef": 0.01})
    a_pass = phases(plan(folder, "8xH100", ppo=sections | {"advantage": "grpo"}))["update"]
    before, after = (phases(made)["update"] for made in (usual, more))
    added = after.beside["arithmetic"] - before.beside["arithmetic"]
    assert added == pytest.approx(a_pass.beside["arithmetic"] / 3)
    weights = 2.0 * usual.models.policy.parameters
    microbatches = 4 * -(-(256 * 512 + 64 * 512) // 4 // 8 // 4096)
    assert after.moved - before.moved == pytest.approx(7 / 8 * microbatches * weights, rel=1e-6)


def test_a_plan_says_what_several_updates_cost(folder: Path):
    sections: dict[str, Any] = {"advantage": "grpo", "kl": {"coef": 0.0}}
    made = plan(folder, "8xH100", ppo=sections | {"minibatch_size": 64})
    once = plan(folder, "8xH100", ppo=sections | {"minibatch_size": 256})
    (note,) = updates_note(made, ONE)
    assert note.startswith("ppo.minibatch_size (64): a step has 4 optimizer steps")
    old = phases(made)["log_probs"].seconds
    assert f"old log-probs in {old:.2g} s" in note
    saved = step_time(made, ONE).seconds - step_time(once, ONE).seconds
    assert f"with 256, which trains otherwise, it has 1 and takes {saved:.2g} s less" in note
    assert list(updates_note(once, ONE)) == []


def test_stage_3_moves_weights_twice_and_gradients_once_for_each_microbatch(folder: Path):
    made = plan(folder, "8xH100", ppo={"advantage": "grpo", "kl": {"coef": 0.0}})
    whole = 2 * made.models.policy.parameters
    # 4 minibatches of 8 responses and 2 prompts a worker: 5120 tokens, two microbatches
    assert phases(made)["update"].moved == pytest.approx(8 * 3 * whole * 7 / 8)
    less = plan(
        folder,
        "8xH100",
        ppo={"advantage": "grpo", "kl": {"coef": 0.0}},
        learner={"zero_stage": 2},
    )
    assert phases(less)["update"].moved == pytest.approx((8 + 4) * whole * 7 / 8)


def test_an_engine_reads_all_weights_for_each_token_of_its_longest_response(folder: Path):
    made = plan(folder, "8xH100")
    generate = phases(made)["generate"]
    cached = 2 * 32 * 8 * 128 * 2  # keys and values of a token in bfloat16
    expected = 512 * (2 * made.models.policy.parameters + 32 * (512 + 256) * cached) / ONE.memory
    assert generate.beside["memory"] == pytest.approx(expected)
    assert generate.limit == "memory"
    half = plan(folder, "8xH100", rollout={"engine": {"tensor_parallel": 2}})
    shared = phases(half)["generate"]
    assert shared.beside["memory"] < generate.beside["memory"]
    assert shared.moved > generate.moved == 0.0


HALF_B = {
    "model_type": "llama",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("taken_s", "generate_s", "reference_s", "update_s"),
    [(6.61, 3.20, 0.73, 2.39), (8.1, 4.6, 0.76, 2.40)],
    ids=["28 November 2026", "27 November 2026"],
)
def test_seconds_are_right_within_half_for_the_runs_that_were_measured(
    tmp_path: Path, taken_s: float, generate_s: float, reference_s: float, update_s: float
):
    """Two runs of docs/performance.md on an H200; both sampled with vLLM's own scheduler."""
    (tmp_path / "config.json").write_text(json.dumps(HALF_B))
    made = plan(
        tmp_path,
        "1xH200",
        model={"dtype": "bfloat16"},
        data={"max_prompt_tokens": 256},
        rollout={
            "prompts_per_step": 32,
            "samples_per_prompt": 8,
            "engine": {"gpu_memory_fraction": 0.4, "sleep": False},
        },
        ppo={"preset": "grpo", "minibatch_size": 256},
        learner={"num_workers": 1, "zero_stage": 2, "max_tokens_per_microbatch": 16384},
    )
    rates = Rates.of(made)
    assert rates is not None
    step = step_time(made, replace(rates, token_s=24e-6))
    seconds = {each.phase: each.seconds for each in step.phases}
    measured = {"generate": generate_s, "score": reference_s, "update": update_s}
    for phase, measured_s in {"step": taken_s, **measured}.items():
        predicted_s = step.seconds if phase == "step" else seconds[phase]
        assert measured_s / 1.5 < predicted_s < 1.5 * measured_s, phase


def test_the_engines_python_works_beside_the_gpu(folder: Path):
    made = plan(folder, "8xH100")
    on_gpu = phases(made)["generate"].seconds
    few, many = (replace(ONE, token_s=s * on_gpu / (32 * 512)) for s in (0.5, 2.0))
    assert phases(made, few)["generate"].seconds == on_gpu
    assert phases(made, many)["generate"].seconds == pytest.approx(2 * on_gpu)
    assert phases(made, many)["generate"].limit == "the engine's Python"


def test_who_stays_awake_moves_nothing_to_the_host(folder: Path):
    assert phases(plan(folder, "8xH100"))["take turns"].limit == "PCIe"
    awake = plan(folder, "8xH100", rollout={"engine": {"sleep": False}})
    assert "take turns" not in phases(awake)


def test_an_engines_weights_pass_to_the_host_only_where_no_push_replaces_them(folder: Path):
    """Dropped before a push, kept where more is sampled (`sample_and_score` of the page)."""
    dropped = plan(folder, "8xH100")
    refilled = plan(folder, "8xH100", ppo={"filter": {"enabled": True}})
    moved = [phases(each)["take turns"].moved for each in (dropped, refilled)]
    held = {role.name: role.memory.held for role in dropped.roles}
    learner = sum(
        size
        for what, size in held["learner worker"].items()
        if what.endswith(("weights", "optimizer"))
    )
    assert moved[0] == 2 * learner + held["reference"]["weights"]
    assert moved[1] - moved[0] == 2 * held["engine"]["weights"]


def test_nodes_share_what_the_slowest_link_carries(folder: Path):
    one, two = Rates.of(plan(folder, "8xH100")), Rates.of(plan(folder, "4xH100,2"))
    slow = Rates.of(plan(folder, "4xH100,100Gbit,2"))
    assert one is not None
    assert two is not None
    assert slow is not None
    assert one.link == 0.7 * 450e9
    assert two.link == 0.7 * 50e9
    assert slow.link == pytest.approx(0.7 * 12.5e9 / 4)
    assert Rates.of(plan(folder, "8xGPU80G")) is None, "their kind is not said"
    assert Rates.of(plan(folder, "8xCPU")) is None


def test_what_is_sampled_ahead_hides_behind_the_update():
    parts = [PhaseTime(name, {"arithmetic": s}) for name, s in (("generate", 3.0), ("score", 1.0))]
    parts.append(PhaseTime("update", {"arithmetic": 5.0}))
    assert StepTime(parts, 8, is_ahead=False).seconds == 9.0
    assert StepTime(parts, 8, is_ahead=True).seconds == 5.0


def test_a_key_is_told_only_where_the_run_then_fits_and_is_faster(folder: Path):
    made = plan(folder, "8xH200,4000G", placement={"frozen": {"reference": {"num_replicas": 1}}})
    rates = Rates.of(made)
    assert rates is not None
    now = step_time(made, rates).seconds
    changes = dict(faster(made))
    assert "placement.frozen.reference.num_replicas=auto" in changes
    for text, seconds in changes.items():
        key, value = text.split("=")
        values: Any = made.config.model_dump()
        section = values
        *path, last = key.split(".")
        for name in path:
            section = section[name]
        section[last] = {"false": False, "true": True}.get(value, value)
        changed = make_plan(PPOConfig.parse(values), made.nodes)
        assert changed.fits
        assert step_time(changed, rates).seconds == pytest.approx(seconds)
        assert seconds < now
    assert "num_replicas=auto" in str(times(step_time(made, rates), faster(made)).caption)


def tensor_parallel_sizes(made: Plan) -> set[str]:
    """Those that are told as faster."""
    said = (text.split("=") for text, _ in faster(made))
    return {value for key, value in said if key == "rollout.engine.tensor_parallel"}


def test_no_key_is_told_with_which_the_run_is_refused(folder: Path):
    """Fourteen heads are cut in two at most, and no engine spans workers on two nodes."""
    asked = {"rollout": {"max_new_tokens": 2048}}
    assert tensor_parallel_sizes(plan(folder, "8xH100", **asked)) == {"8"}
    assert tensor_parallel_sizes(plan(folder, "1xH100,2000G,8", **asked)) == set()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | {"num_attention_heads": 14}))
    assert tensor_parallel_sizes(plan(folder, "8xH100", **asked)) == {"2"}
