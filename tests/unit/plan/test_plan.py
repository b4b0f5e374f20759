"""What fits, what does not, and which key the plan says to change."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raypo.cluster.hardware import parse_cluster
from raypo.config import ConfigError, PPOConfig, parse_run_config
from raypo.config.sweep_config import with_values
from raypo.plan.estimate import COMMUNICATOR
from raypo.plan.fit import Plan, make_plan, remedies
from raypo.plan.tables import gb, tables
from raypo.plan.times import Rates, step_time
from scripts.scale_table import QWEN, SIZES

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def values(tmp_path: Path) -> dict:
    for name, config in (("8b", LLAMA_8B), ("1b", LLAMA_1B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {
        "name": "run",
        "model": {"policy": str(tmp_path / "1b"), "dtype": "bfloat16"},
        "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 128, "max_new_tokens": 1024, "samples_per_prompt": 4},
        "learner": {"num_workers": 8, "max_tokens_per_microbatch": 4096},
    }


def plan(values: dict, cluster: str) -> Plan:
    return make_plan(PPOConfig.parse(values), parse_cluster(cluster))


def test_a_billion_weights_fit_eight_large_gpus(values: dict):
    made = plan(values, "8xGPU80G,128xCPU,1000G")
    assert made.fits, made.problems
    assert [bundle.devices for bundle in made.bundles] == [f"GPU {i}" for i in range(8)]
    assert made.bundles[0].roles == ("learner worker 0", "engine:0", "reference:0")
    assert made.bundles[7].roles == ("learner worker 7", "engine:7", "reference:7")
    assert [load.name for load in made.loads][-1] == "node 0 RAM"
    (chosen,) = [choice for choice in made.choices if choice.is_chosen]
    assert chosen.sharding.stage == 2


def test_a_critic_with_workers_of_its_own_leaves_the_policys_devices(values: dict):
    values["rollout"]["engine"] = {"sleep": False}
    together = plan(values, "8xGPU80G,128xCPU,1000G")
    values["learner"] |= {"num_workers": 6, "critic_workers": 2}
    apart = plan(values, "8xGPU80G,128xCPU,1000G")
    assert apart.fits, apart.problems
    assert apart.bundles[5].roles == ("learner worker 5", "engine:5", "reference:5")
    assert apart.bundles[6].roles == ("critic worker 6", "reference:6")
    held = {role.name: role.memory.held for role in apart.roles}
    both = {role.name: role.memory.held for role in together.roles}["learner worker"]
    assert not [name for name in held["learner worker"] if name.startswith("critic")]
    assert not [name for name in held["critic worker"] if name.startswith("policy")]
    # Two workers share what eight shared.
    assert held["critic worker"]["critic optimizer"] == 4 * both["critic optimizer"]
    assert {choice.sharding.stage for choice in apart.choices} == {1, 2, 3}


def test_a_model_that_its_workers_load_whole_is_planned_for_at_stage_3(
    values: dict, tmp_path: Path
):
    """DeepSpeed moves it to the GPU and cuts it there: that of a team, and a reward model."""
    values["model"]["policy"] = str(tmp_path / "8b")
    values["learner"] |= {"num_workers": 16, "zero_stage": 3}
    together = plan(values, "8xGPU80G,2").roles[0].memory
    assert "load" not in together.phases, "each loads its share"
    values["learner"] |= {"critic_workers": 16}
    apart = plan(values, "8xGPU80G,4")
    policy, critic, *_ = (role.memory for role in apart.roles)
    assert apart.models.critic is not None
    for memory, weights in (
        (policy, apart.models.policy.parameters),
        (critic, apart.models.critic.backbone_parameters),
    ):
        at_load = memory.steady + memory.added("load")
        assert at_load == memory.held["runtime"] + 2 * weights
    values["learner"] |= {"zero_stage": 2}
    assert "load" not in plan(values, "8xGPU80G,4").roles[0].memory.phases, "it stays whole"
    values["learner"] = {"num_workers": 16, "zero_stage": 3}
    reward = parse_run_config(examples_run(values, "reward_model"), origin="run")
    made = make_plan(reward, parse_cluster("8xGPU80G,2"))  # type: ignore[arg-type]
    assert made.roles[0].memory.added("load") > 0


def test_each_group_of_nccl_takes_memory_of_a_gpu(values: dict):
    """Communicators of a process: of the learner workers, of a sharded engine, of a broadcast."""

    def runtimes(workers: int, tensor_parallel: int, mode: str) -> list[float]:
        values["learner"]["num_workers"] = workers
        values["rollout"]["engine"] = {"tensor_parallel": tensor_parallel}
        values["placement"] = {"mode": mode}
        roles = plan(values, "16xGPU80G,128xCPU,1000G").roles
        held = {role.name: role.memory.held["runtime"] / COMMUNICATOR for role in roles}
        return [held[name] - 1.2 for name in ("learner worker", "engine")]

    assert runtimes(1, 1, "colocated") == pytest.approx([0, 0])
    assert runtimes(2, 1, "colocated") == pytest.approx([1, 0])
    assert runtimes(2, 2, "colocated") == pytest.approx([1, 1])
    assert runtimes(1, 1, "dedicated") == pytest.approx([1, 1])
    assert runtimes(2, 2, "dedicated") == pytest.approx([2, 2])


def test_a_deployed_judge_takes_memory_and_time(values: dict, tmp_path: Path):
    without = plan(values, "8xGPU80G")
    criteria = {"right": "it is right", "kind": "it is kind"}
    template = "Is it true that {criterion} of {response}?"
    judge = {"path": str(tmp_path / "8b"), "template": template, "criteria": criteria}
    values["reward"] = {"judge": judge}
    values["placement"] = {"frozen": {"judge": {"tensor_parallel": 2, "gpu_memory_fraction": 0.5}}}
    made = plan(values, "8xGPU80G")
    (role,) = [role for role in made.roles if role.name == "judge"]
    assert role.memory.held["weights"] == pytest.approx(8.03e9 * 2 / 2, rel=0.001)
    assert sum(role.memory.held.values()) == pytest.approx(0.5 * (made.gpu_bytes or 0), rel=0.001)
    replicas = [each for bundle in made.bundles for each in bundle.roles if "judge" in each]
    assert sorted(replicas) == sorted([f"judge:{number}" for number in range(4)] * 2)

    rates = Rates(1e15, 1e12, 1e11, 1e10, store=1e9)

    def score(each: Plan) -> float:
        return next(p for p in step_time(each, rates).phases if p.phase == "score").seconds

    # 512 responses of two criteria on four replicas: 256 answers of 512 tokens each, at once
    read = 512 * 8.03e9 * 2 / 2 / rates.memory
    assert score(made) - score(without) >= read
    judge |= {"criteria": {}, "template": "{response}", "sampling": {"max_tokens": 8}}
    assert score(plan(values, "8xGPU80G")) - score(without) < read


def test_replayed_experts_take_a_byte_for_each_token_and_choice(values: dict, tmp_path: Path):
    """Qwen3-30B-A3B: 48 layers, 8 of 128 experts; keys and values of 98 kB a token."""
    experts = {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2_048,
        "intermediate_size": 6_144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text(json.dumps(experts))
    values["model"]["policy"] = str(tmp_path / "moe")
    values["rollout"]["engine"] = {"kv_cache_gb": 20.0}
    without = plan(values, "8xGPU180G")
    values["rollout"]["router_replay"] = "engine"
    made = plan(values, "8xGPU180G")
    for before, after in zip(without.roles, made.roles, strict=True):
        own = {"engine": 20e9 // 98_304 * 384, "learner worker": 128 * 4 // 8 * 2048 * 384}
        added = {**after.memory.held, **after.memory.host}
        assert added.pop("experts", 0) == own.get(after.name, 0), after.name
        assert added == {**before.memory.held, **before.memory.host}
    assert [role.name for role in made.roles] == ["learner worker", "engine", "reference"]


def test_higher_stages_and_off_loading_need_less_of_the_device(values: dict):
    values["rollout"]["engine"] = {"sleep": False}  # else another phase is the worst one
    by_name = {str(c.sharding): c.device.needed for c in plan(values, "8xGPU80G").choices}
    assert "0" not in by_name  # in bfloat16 it is 1
    assert by_name["1"] > by_name["2"] > by_name["3"]
    assert by_name["2"] > by_name["2 + optimizer off-loaded"]
    assert by_name["3"] > by_name["3 + optimizer off-loaded"]


def test_what_does_not_fit_names_device_phase_and_keys_that_help(values: dict, tmp_path: Path):
    values["model"]["policy"] = str(tmp_path / "8b")
    made = plan(values, "8xGPU80G,128xCPU,2000G")
    assert not made.fits
    (problem,) = made.problems
    assert problem.startswith("memory (node 0 GPU 0): needs ")
    assert "in the phase update, 76 GB of 80 GB are usable. Set learner.zero_stage to 3" in problem


def test_who_does_not_work_makes_room_on_the_gpu_and_lies_in_ram(values: dict, tmp_path: Path):
    """The same run without sleep needs engine and learner side by side."""
    values["model"]["policy"] = str(tmp_path / "8b")
    hardware = "8xGPU141G,128xCPU,2000G"
    turns = plan(values, hardware)
    assert turns.fits, turns.problems
    values["rollout"]["engine"] = {"sleep": False}
    beside = plan(values, hardware)
    assert not beside.fits
    assert turns.loads[0].needed < beside.loads[0].needed
    weights = 2 * 8_030_261_248  # bfloat16
    assert turns.loads[-1].needed - beside.loads[-1].needed >= 8 * 2 * weights


def test_pushed_weights_lie_in_the_object_store_only_where_they_go_through_it(values: dict):
    through, around = [
        plan(values | {"rollout": {**values["rollout"], "engine": {"transport": kind}}}, "8xGPU80G")
        for kind in ("object", "ipc")
    ]
    weights = 2 * 1_235_814_400
    assert through.loads[-1].needed - around.loads[-1].needed == weights


def test_engines_apart_that_share_a_gpu_get_their_weights_through_the_object_store(values: dict):
    values["placement"] = {"mode": {"engine": "dedicated"}, "gpus": {"engine": 0.5}}
    engine = {"count": 2, "gpu_memory_fraction": 0.4}
    by_auto, by_object = [
        plan(values | {"rollout": {**values["rollout"], "engine": engine | more}}, "16xGPU80G")
        for more in ({}, {"transport": "object"})
    ]
    assert by_auto.loads[-1].needed == by_object.loads[-1].needed


def test_the_keys_that_a_plan_names_make_it_fit(values: dict):
    values["learner"]["max_tokens_per_microbatch"] = 65_536
    values["ppo"] = {"minibatch_size": 512}
    made = plan(values, "8xGPU80G")
    (problem,) = made.problems
    remedy = "learner.max_tokens_per_microbatch to "
    assert remedy in problem
    tokens = int(problem.split(remedy)[1].split(",")[0].split(".")[0])
    values["learner"]["max_tokens_per_microbatch"] = tokens
    assert plan(values, "8xGPU80G").fits
    values["learner"]["max_tokens_per_microbatch"] = 2 * tokens
    assert not plan(values, "8xGPU80G").fits, "it is the mildest of the halves"
    assert problem.count(remedy) == 1


def test_an_engine_without_room_for_one_sequence_is_refused(values: dict):
    values["rollout"]["engine"] = {"kv_cache_gb": 0.01}
    (problem,) = plan(values, "8xGPU80G").problems
    assert problem.startswith("rollout.engine.kv_cache_gb (0.01): one sequence of 2048 tokens")
    least = problem.split("at least ")[1].split(",")[0]
    values["rollout"]["engine"] = {"kv_cache_gb": float(least)}
    assert plan(values, "8xGPU80G").fits


def test_an_engine_that_its_share_of_the_gpu_cannot_hold_is_refused(values: dict):
    values["rollout"]["engine"] = {"gpu_memory_fraction": 0.03}
    (problem,) = plan(values, "8xGPU80G").problems
    assert problem.startswith("rollout.engine.gpu_memory_fraction (0.03): of 80 GB it leaves 0 GB")
    least = problem.split("at least ")[1].split(",")[0]
    values["rollout"]["engine"] = {"gpu_memory_fraction": float(least)}
    assert plan(values, "8xGPU80G").fits


def test_gpus_that_are_demanded_but_not_there(values: dict):
    values["learner"]["use_gpu"] = True
    with pytest.raises(ConfigError, match=r"learner.use_gpu \(True\): no node has a GPU"):
        plan(values, "64xCPU")


def test_on_cpu_everything_lies_in_ram(values: dict):
    values["learner"]["num_workers"] = 1
    values["learner"]["max_tokens_per_microbatch"] = 2_048
    small = plan(values, "4xCPU,16G")
    assert not small.fits
    assert small.problems[0].startswith("memory (node 0 RAM): needs ")
    assert plan(values, "4xCPU,512G").fits
    assert {choice.sharding.offload_optimizer for choice in small.choices} == {False}


def test_what_nobody_stated_is_not_checked_and_said(values: dict):
    made = plan(values, "8xGPU80G")
    assert made.fits
    assert any("RAM is not stated" in note for note in made.notes)


def test_checkpoints_are_copied_where_the_nodes_have_the_memory(values: dict):
    made = plan(values, "8xGPU80G,1024G")
    (load,) = (load for load in made.loads if load.name.endswith("RAM"))
    assert load.available is not None
    weights = made.models.policy.parameters
    exported = 2 * weights  # on the first worker; each is planned as if it were the first
    assert load.snapshot >= 2 * 12 * weights + exported  # policy and critic
    assert any("while the next steps run" in note for note in made.notes)
    tight = int(load.needed + 1.9 * load.snapshot) // 10**9
    made = plan(values, f"8xGPU80G,{tight}G")
    assert made.fits
    assert any("(auto): checkpoints are written within their step" in note for note in made.notes)
    values["learner"] |= {"num_workers": 4, "critic_workers": 4, "save_critic": True}
    notes = plan(values, "8xGPU80G,1024G").notes
    assert not any("checkpoint" in note for note in notes), "two workers write models"
    values["checkpoint"] = {"background": True}
    assert not any("checkpoint" in note for note in plan(values, f"8xGPU80G,{tight}G").notes)


def test_what_is_tensor_parallel_spans_the_workers_bundles(values: dict):
    """Engines pair the workers up; of a frozen model there is one for every four."""
    frozen = {"backend": "vllm", "tensor_parallel": 4, "gpu_memory_fraction": 0.2}
    values["placement"] = {"frozen": {"reference": frozen}}
    values["rollout"]["engine"] = {"tensor_parallel": 2}
    made = plan(values, "8xGPU80G,128xCPU,1000G")
    assert made.fits, made.problems
    roles = [bundle.roles for bundle in made.bundles]
    assert roles[0] == ("learner worker 0", "engine:0", "reference:0")
    assert roles[1] == ("learner worker 1", "engine:0", "reference:0")
    assert roles[2] == ("learner worker 2", "engine:1", "reference:0")
    assert roles[4] == ("learner worker 4", "engine:2", "reference:1")
    weights = {role.name: role.memory.held.get("weights", 0) for role in made.roles}
    assert weights["engine"] == 2 * weights["reference"]


def test_on_cpu_each_of_its_processes_is_counted(values: dict):
    """Colocated and dedicated alike: half of the weights twice, and runtimes of three processes."""
    values["learner"]["num_workers"] = 2
    needed = {}
    for mode in ("colocated", "dedicated"):
        for size in (1, 2):
            values["placement"] = {"mode": mode}
            values["rollout"]["engine"] = {"tensor_parallel": size, "count": 1, "kv_cache_gb": 1}
            (load,) = plan(values, "16xCPU,512G").loads
            needed[mode, size] = load.needed
    alone, worker, asks = (each * 10**6 for each in (1100, 900, 750))
    cache, sampling = 10**9, 256 * 128_256 * 12
    for mode in ("colocated", "dedicated"):
        assert needed[mode, 2] - needed[mode, 1] == (2 * worker + asks - alone + cache + sampling)


def test_one_sequence_is_cut_over_the_devices_of_an_engine(values: dict):
    values["rollout"]["engine"] = {"kv_cache_gb": 0.05}
    assert not plan(values, "8xGPU80G").fits
    values["rollout"]["engine"]["tensor_parallel"] = 8
    assert plan(values, "8xGPU80G").fits


def test_workers_that_share_a_replica_and_lie_apart_are_found(values: dict):
    """Six workers on nodes of three GPUs: the second engine would lie on both."""
    values["learner"]["num_workers"] = 6
    values["rollout"]["engine"] = {"tensor_parallel": 2}
    assert plan(values, "6xGPU80G").fits
    (problem,) = plan(values, "3xGPU80G,2").problems
    assert problem.startswith("rollout.engine.tensor_parallel (2): learner workers 2 to 3 would")
    values["placement"] = {"strategy": "STRICT_SPREAD"}
    with pytest.raises(
        ConfigError, match=r"placement\.strategy \(STRICT_SPREAD\): .* own node, but 2"
    ):
        plan(values, "3xGPU80G,2")


def test_what_scores_while_the_learner_updates_needs_its_memory_at_the_same_time(values: dict):
    """The engine has a GPU of its own; the reference lies on the learner's, in both modes."""
    values["placement"] = {"mode": {"engine": "dedicated"}}
    values["learner"] = {**values["learner"], "num_workers": 1}
    values["rollout"] = {**values["rollout"], "engine": {"count": 1}}

    def needed(mode: str) -> int:
        values["rollout"] = {**values["rollout"], "mode": mode}
        loads = plan(values, "2xGPU80G,8xCPU,1000G").loads
        return max(load.needed for load in loads if "GPU 1" in load.name)

    assert needed("one_step_off") > needed("sync")
    assert needed("async") == needed("one_step_off")


def test_the_tables_say_what_the_plan_says(values: dict):
    made = plan(values, "8xGPU80G,128xCPU,1000G")
    console = Console(width=200, record=True, file=StringIO())
    for table in tables(made):
        console.print(table)
    text = console.export_text()
    for bundle in made.bundles:
        assert f"{', '.join(bundle.roles)} " in text
    for role in made.roles:
        assert gb(role.memory.peak) in text
        assert all(phase in text for phase in role.memory.phases)
    assert text.count("<- this run") == 1
    assert text.count("GPU 0") == 2  # its bundle, and its memory


def test_the_table_of_choices_has_this_run_whatever_it_chose(values: dict):
    off_load = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    values["learner"] |= {"zero_stage": 1, "deepspeed": off_load}
    for cluster, verdict in (
        ("8xGPU80G,1000G", "fits"),
        ("8xGPU80G", "not checked"),  # the nodes' RAM
        ("8xGPU80G,20G", "too much"),
    ):
        *_, choices = tables(plan(values, cluster))
        console = Console(width=200, record=True, file=StringIO())
        console.print(choices)
        (line,) = [line for line in console.export_text().splitlines() if "<- this run" in line]
        assert line.strip().startswith("1 + optimizer off-loaded ")
        assert f" {verdict} <- this run" in line


def test_the_length_of_an_episode_is_told_by_its_own_key(values: dict):
    episodes = {"environment": "env.py:Env", "max_turns": 4, "max_episode_tokens": 2048}
    values["rollout"] |= {**episodes, "engine": {"kv_cache_gb": 0.01}}
    (problem,) = plan(values, "8xGPU80G").problems
    assert "3072 tokens (data.max_prompt_tokens + rollout.max_episode_tokens) takes" in problem


def test_frozen_models_lie_on_every_gpu_or_as_often_as_is_asked(values: dict):
    def where(cluster: str) -> list[int]:
        bundles = plan(values, cluster).bundles
        return [index for index, bundle in enumerate(bundles) if "reference" in str(bundle.roles)]

    assert where("8xGPU80G") == [*range(8)]
    assert where("8xCPU") == [0], "on CPUs once a node"
    assert where("4xCPU,2") == [0, 4]
    placement: dict[str, Any] = {"frozen": {"reference": {"num_replicas": 3}}}
    values["placement"] = placement
    assert where("8xGPU80G") == [0, 2, 5]
    placement["mode"] = {"reference": "dedicated"}
    bundles = plan(values, "8xGPU80G,2").bundles
    occupants = [role for bundle in bundles for role in bundle.roles if "reference" in role]
    assert occupants == ["reference:0", "reference:1", "reference:2"]
    values["placement"] = {"frozen": {"reference": {"num_replicas": 9}}}
    with pytest.raises(
        ConfigError, match=r"there are 8 .* for 9 replicas \(placement\.frozen\.ref"
    ):
        plan(values, "8xGPU80G")


def examples_run(values: dict, recipe: str, **sections: Any) -> dict:
    """A run of the same model that learns from examples."""
    run = {name: values[name] for name in ("name", "model", "data", "learner")}
    return run | {"recipe": recipe} | sections


def memory_of(values: dict, cluster: str = "8xGPU80G") -> dict[str, dict[str, int]]:
    """By role what it always holds, and by phase what is added."""
    made = make_plan(parse_run_config(values, origin="run"), parse_cluster(cluster))  # type: ignore[arg-type]
    assert made.fits, made.problems
    return {role.name: {**role.memory.held, **role.memory.phases["update"]} for role in made.roles}


def test_runs_on_examples_have_one_model_and_no_engine_unless_somebody_judges(values: dict):
    judged = {"eval": {"prompts": "held_out.jsonl", "function": "judge.py:score"}}
    assert list(memory_of(examples_run(values, "sft"))) == ["learner worker"]
    assert list(memory_of(examples_run(values, "reward_model"))) == ["learner worker"]
    made = make_plan(
        parse_run_config(examples_run(values, "dpo", **judged), origin="run"),  # type: ignore[arg-type]
        parse_cluster("8xGPU80G,128xCPU,1000G"),
    )
    assert [role.name for role in made.roles] == ["learner worker", "engine"]
    assert made.bundles[0].roles == ("learner worker 0", "engine:0")
    assert "critic optimizer" not in made.roles[0].memory.held


@pytest.mark.parametrize("recipe", ["sft", "dpo"])
def test_pushes_to_an_engine_that_answers_held_out_prompts_are_in_memory(values: dict, recipe: str):
    judged = {"eval": {"prompts": "held_out.jsonl", "function": "judge.py:score"}}
    cluster = parse_cluster("8xGPU80G,128xCPU,1000G")
    plans = [
        make_plan(parse_run_config(examples_run(values, recipe, **more), origin="run"), cluster)  # type: ignore[arg-type]
        for more in ({}, judged)
    ]
    without, pushes = (made.roles[0].memory for made in plans)
    assert not {"push", "probe"} & without.phases.keys()
    assert {"push", "probe"} <= pushes.phases.keys()
    assert pushes.host == {"push bucket": 2 * 128256 * 2048}  # larger than a bucket: the embedding


def test_a_reference_of_its_own_is_in_memory_while_it_is_asked(values: dict):
    model = values["model"] | {"reference": values["model"]["policy"]}
    plans = [
        make_plan(parse_run_config(run, origin="run"), parse_cluster("8xGPU80G"))  # type: ignore[arg-type]
        for run in (examples_run(values, "dpo"), examples_run(values, "dpo", model=model))
    ]
    none, own = (made.roles[0].memory for made in plans)
    assert "reference" not in none.phases["log_probs"]
    assert own.phases["log_probs"]["reference"] == 2 * plans[0].models.policy.parameters
    assert own.phases["update"] == none.phases["update"]


def test_an_adapter_of_rank_16_trains_beside_one_base_of_7b(values: dict, tmp_path: Path):
    """On one GPU of 80 GB, where all weights do not fit: 40 million of 7.6 billion learn."""
    (tmp_path / "7b").mkdir()
    (tmp_path / "7b" / "config.json").write_text(json.dumps(QWEN | SIZES["7B"]))
    values["model"]["policy"] = str(tmp_path / "7b")
    values["learner"]["num_workers"] = 1
    values["ppo"] = {"preset": "grpo"}
    assert not plan(values, "1xH100,16xCPU,500G").fits
    values["model"]["lora"] = {"rank": 16, "push": "adapter"}
    made = plan(values, "1xH100,16xCPU,500G")
    assert made.fits, made.problems
    assert [bundle.roles for bundle in made.bundles] == [("learner worker 0", "engine:0")]
    memory = {role.name: role.memory for role in made.roles}
    weights, adapter = 7_615_616_512, 40_370_176  # as transformers and peft count them
    learner, engine = memory["learner worker"].held, memory["engine"].held
    assert learner["policy weights"] == 2 * (weights + adapter)
    assert learner["policy optimizer"] == 12 * adapter, "master weights and two moments"
    assert (engine["weights"], engine["adapter"]) == (2 * weights, 2 * adapter)


@pytest.mark.parametrize("size", ["1b", "8b"])
@pytest.mark.parametrize("cluster", ["1xH100,500G", "4xL4", "8xH100", "2x8xH100,1T"])
@pytest.mark.parametrize("rest", [{}, {"rollout": {"engine": {"sleep": False}}}])
def test_every_remedy_makes_the_run_fit(values: dict, size: str, cluster: str, rest: dict):
    """Each alternative that a plan names is applied, and the run is planned again."""
    values["model"]["policy"] = values["model"]["policy"].replace("1b", size)
    values["learner"]["num_workers"] = 1
    values["rollout"] |= rest.get("rollout", {})
    made = plan(values, cluster)
    if made.fits:
        return
    for changes in remedies(made):
        changed = with_values(made.config.model_dump(), changes)
        again = make_plan(PPOConfig.parse(changed), made.nodes)
        assert again.fits, (changes, again.problems)
        for key in changes if len(changes) > 1 else ():
            fewer = {name: value for name, value in changes.items() if name != key}
            try:
                less = PPOConfig.parse(with_values(made.config.model_dump(), fewer))
            except ConfigError:  # workers share a row only if there are as many workers
                continue
            assert not make_plan(less, made.nodes).fits, f"{key} is not needed"


def test_idle_gpus_are_the_first_remedy_and_are_named(values: dict):
    """One of eight GPUs is used by default, and 8B does not fit it."""
    values["model"]["policy"] = values["model"]["policy"].replace("1b", "8b")
    values["learner"]["num_workers"] = 1
    values["ppo"] = {"preset": "grpo"}
    made = plan(values, "8xH100,2T")
    assert "7 of 8 GPUs are idle" in " ".join(made.notes)
    first, *_ = remedies(made)
    assert first.keys() == {"learner.num_workers"}
    assert "Set learner.num_workers to " in made.problems[0]
    values["learner"]["num_workers"] = 8
    assert "idle" not in " ".join(plan(values, "8xH100,2T").notes)


def test_too_few_cores_for_the_gpus_are_named(values: dict):
    few = [note for note in plan(values, "8xGPU80G,16xCPU").notes if "CPU cores" in note]
    assert few == [
        "node 0 has 16 CPU cores for 8 GPUs: learner, engine and Ray keep about 3 cores busy for "
        "each GPU, so steps may take longer than predicted"
    ]
    for enough in ("8xGPU80G,24xCPU", "8xGPU80G"):
        assert "CPU cores" not in " ".join(plan(values, enough).notes)


def test_what_is_pushed_of_an_adapter_is_the_adapter(values: dict):
    made = {}
    for push in ("merged", "adapter"):
        values["model"]["lora"] = {"rank": 16, "push": push}
        step = step_time(plan(values, "8xH100"), Rates(1e15, 1e12, 1e11, 1e10, store=1e9, push_s=0))
        made[push] = {each.phase: each for each in step.phases}["push"]
    rank_16 = 16 * 16 * (2_048 * 2 + 2 * (2_048 + 512) + 2_048 * 2 + 3 * (2_048 + 8_192))
    assert made["adapter"].seconds == pytest.approx(2 * rank_16 / 1e9)
    assert made["merged"].limit == "ipc"
