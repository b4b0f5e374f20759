"""Values of `auto` on GPUs: whether models take turns, and the tokens of a micro-batch."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.cluster.hardware import GB, parse_cluster
from raypo.cluster.placement import served_roles
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.config.auto_values import least_memory
from raypo.plan.fit import SIDE_BY_SIDE, Plan, decide_for_gpus, make_plan, tried
from raypo.plan.times import sampled_of
from raypo.run.served_roles import measures_free_memory
from raypo.run.setup import Shared, decided_together
from raypo.run.shared_services import shared_handles_for
from tests.unit.learner.plain import on_workers
from tests.unit.plan.test_plan import LLAMA_1B, LLAMA_8B


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    for name, config in (("8b", LLAMA_8B), ("1b", LLAMA_1B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {
        "name": "run",
        "model": {"policy": str(tmp_path / "1b"), "dtype": "bfloat16"},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 512},
        "ppo": {"preset": "grpo"},
        "rollout": {"prompts_per_step": 64, "max_new_tokens": 512, "samples_per_prompt": 4},
        "learner": {"num_workers": 2},
    }


def plan(values: dict[str, Any], cluster: str, **keys: Any) -> Plan:
    return make_plan(PPOConfig.parse(with_keys(values, keys)), parse_cluster(cluster))


def with_keys(values: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    made = json.loads(json.dumps(values))
    for key, value in keys.items():
        *sections, name = key.split("__")
        section = made
        for each in sections:
            section = section.setdefault(each, {})
        section[name] = value
    return made


def config_of(plan: Plan) -> PPOConfig:
    assert isinstance(plan.config, PPOConfig)
    return plan.config


def choice(plan: Plan) -> tuple[bool, int]:
    config = config_of(plan)
    return config.rollout.engine.sleeps, config.learner.microbatch_tokens


def fullest(plan: Plan) -> float:
    return max(load.needed / (load.available or 1) for load in plan.loads if load.is_gpu)


def test_what_fits_side_by_side_stays_and_has_large_microbatches(values):
    made = plan(values, "2xGPU180G")
    assert choice(made) == (False, 32768)
    assert fullest(made) <= SIDE_BY_SIDE
    sleep = next(each for each in made.decisions if each.startswith("rollout.engine.sleep"))
    assert "false, all models fit at the same time" in sleep
    assert "of 180 GB" in sleep
    assert set(made.decisions) <= set(made.notes), "`raypo plan` prints them"


def test_less_memory_first_takes_tokens_and_then_turns(values):
    seen = [choice(plan(values, f"2xGPU{gb}G")) for gb in range(180, 20, -10)]
    order = [
        (False, 32768),
        (False, 16384),
        (False, 8192),
        (False, 4096),
        (True, 32768),
        (True, 16384),
        (True, 8192),
        (True, 4096),
    ]
    ranks = [order.index(each) for each in seen]
    assert ranks == sorted(ranks)
    assert len({*ranks}) >= 4


@pytest.mark.parametrize("sleep", [True, False])
def test_what_is_set_wins(values, sleep):
    keys = {"rollout__engine__sleep": sleep, "learner__max_tokens_per_microbatch": 1111}
    for cluster in ("2xGPU180G", "2xGPU24G"):
        made = plan(values, cluster, **keys)
        assert choice(made) == (sleep, 1111)
        assert made.decisions == ()


def test_a_model_that_is_too_large_takes_turns_with_few_tokens_and_the_plan_says_it_is_too_large(
    values, tmp_path
):
    made = plan(values, "2xGPU24G", model__policy=str(tmp_path / "8b"))
    assert choice(made) == (True, 4096)
    assert made.problems


def test_without_knowledge_of_the_gpus_models_take_turns(values):
    made = plan(values, "2xGPU180G")
    unknown = parse_cluster("2xGPU180G")
    nodes = [type(node)(node.name, gpus=2) for node in unknown]
    assert choice(make_plan(PPOConfig.parse(values), nodes)) == (True, 4096)
    assert choice(made) != (True, 4096)


def test_on_cpus_nothing_is_decided(values):
    made = plan(values, "8xCPU,64G", model__dtype="float32")
    assert choice(made) == (False, 4096)
    assert made.config.learner.max_tokens_per_microbatch == "auto"
    assert made.decisions == ()


@pytest.mark.parametrize("gb", [180, 80, 40])
@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD"])
def test_workers_decide_as_the_plan_does_and_change_nothing_else(values, gb, strategy):
    values["placement"] = {"strategy": strategy}
    config = PPOConfig.parse(values)
    decided, messages = decide_for_gpus(config, gb * GB)
    planned = make_plan(config, parse_cluster(f"1xGPU{gb}G,2"))
    assert decided.differences(config) == planned.config.differences(config)
    assert len(messages) == 2
    assert isinstance(decided, PPOConfig)
    known = decided.rollout.engine.kv_cache_gb is not None
    assert len(decided.differences(config)) == 2 + known
    assert known is not decided.rollout.engine.sleeps


def test_what_stays_awake_starts_at_once_with_a_kv_cache_of_the_planned_size(values):
    """vLLM measures nothing then, so nothing has to wait until it has started."""
    made = plan(values, "2xGPU180G")
    engine = next(role.memory for role in made.roles if role.name == "engine")
    size = config_of(made).rollout.engine.kv_cache_gb
    assert size is not None
    assert engine.held["KV cache"] == pytest.approx(size * 1e9)
    # What vLLM would have measured: the fraction, less everything else that it holds.
    assert sum(engine.held.values()) == pytest.approx(0.5 * 180 * GB, abs=1e7)
    assert engine.held["activations"] > 0

    more = tried(made, {"rollout.engine.gpu_memory_fraction": 0.6})
    assert more is not None
    assert (config_of(more).rollout.engine.kv_cache_gb or 0) > size, "advice may still change it"

    given = plan(values, "2xGPU180G", rollout__engine__kv_cache_gb=3.0)
    assert config_of(given).rollout.engine.kv_cache_gb == 3.0
    for other in (
        plan(values, "2xGPU40G"),  # the models take turns
        plan(values, "8xGPU180G", placement__mode="dedicated"),  # the engine is alone
        plan(values, "2xGPU60G", rollout__engine__sleep=False),  # the prediction has no margin
        plan(values, "8xCPU,64G", model__dtype="float32"),
    ):
        assert config_of(other).rollout.engine.kv_cache_gb is None


def test_the_cache_gets_what_fewer_sequences_leave(values):
    values |= {"learner": {"num_workers": 1}}
    whole = plan(values, "1xGPU180G")
    values["rollout"] |= {"engine": {"extra": {"max_num_seqs": 1024}}}
    usual = plan(values, "1xGPU180G")
    held = [
        next(role.memory.held for role in made.roles if role.name == "engine")
        for made in (whole, usual)
    ]
    logits = 3 * 4 * LLAMA_1B["vocab_size"]
    assert [each["sampling"] for each in held] == [64 * 4 * logits, 1024 * logits]
    assert held[0]["KV cache"] - held[1]["KV cache"] == pytest.approx(768 * logits, abs=2e7)
    assert sampled_of(whole) == (256, 256)


def test_roles_wait_for_each_other_only_where_vllm_measures_free_memory(values):
    values["placement"] = {"frozen": {"reference": {"backend": "torch"}}}
    in_torch = plan(values, "2xGPU180G")
    values["placement"] = {"frozen": {"reference": {"backend": "vllm"}}}
    in_vllm = plan(values, "4xGPU180G", rollout__engine__gpu_memory_fraction=0.2)
    for made, measuring in ((in_torch, []), (in_vllm, ["reference"])):
        roles = served_roles(config_of(made), num_workers=2, use_gpu=True)
        assert [role.name for role in roles if measures_free_memory(role)] == measuring
    undecided = served_roles(PPOConfig.parse(values), num_workers=2, use_gpu=True)
    assert all(measures_free_memory(role) for role in undecided)


def test_all_workers_decide_by_the_smallest_gpu(values):
    config, told = PPOConfig.parse(values), list[str]()

    def decide(workers: Workers) -> Any:
        size = (180 - 140 * workers.rank) * GB
        return decided_together(config, workers, decide_for_gpus, gpu_bytes=size, tell=told.append)

    first, second = on_workers(2, decide)
    assert first == second == decide_for_gpus(config, 40 * GB)[0]
    assert len(told) == 2


def test_a_model_that_no_plan_can_read_is_taken_to_need_all_memory(values, tmp_path):
    values["model"]["policy"] = str(tmp_path / "nothing")
    config = PPOConfig.parse(values)
    decided, messages = decide_for_gpus(config, 180 * GB)
    assert decided == least_memory(config, 180 * GB)[0]
    assert isinstance(decided, PPOConfig)
    assert decided.rollout.engine.sleep is True
    assert decided.learner.max_tokens_per_microbatch == 4096
    assert len(messages) == 1


def test_what_a_sweep_shares_does_for_trials_that_have_decided(values):
    config = PPOConfig.parse(values)
    handle: Any = SimpleNamespace(is_lost=lambda: False)
    shared = Shared(config, handles={"reference": handle})
    decided, _ = decide_for_gpus(config, 180 * GB)
    assert isinstance(decided, PPOConfig)
    assert shared_handles_for(shared, decided, "trial", Workers()) == {"reference": handle}
    other = PPOConfig.parse(with_keys(values, {"rollout__temperature": 0.5}))
    assert shared_handles_for(shared, other, "trial", Workers()) == {}
