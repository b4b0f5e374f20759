"""IPC and NCCL pushes to real engines, sleeping engines, and a learner off-loaded for real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.needs import needs_gpus
from tests.integration.task import read_metrics, write_task
from tests.tiny import tiny_policy

MAX_GAP = {"float32": 1e-3, "bfloat16": 0.15}


def run(folder: Path, **overrides: Any) -> list[dict[str, Any]]:
    from raypo import PPOConfig, PPOTrainer

    keys = {"num_steps": 2, "learner.use_gpu": True, "rollout.engine.gpu_memory_fraction": 0.3}
    config = PPOConfig.load(write_task(folder), keys | overrides)
    result = PPOTrainer(config).fit()
    assert result.return_value == {"status": "finished", "step": 2}
    return read_metrics(folder / "runs" / "tiny")


@needs_gpus(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", ["ipc", "object"])
@pytest.mark.parametrize("sleep", [True, False])
def test_a_colocated_run_agrees_by_each_transport_asleep_and_awake(
    tmp_path: Path, dtype: str, transport: str, sleep: bool
):
    rows = run(
        tmp_path,
        **{
            "model.dtype": dtype,
            "rollout.engine.transport": transport,
            "rollout.engine.sleep": sleep,
        },
    )
    assert all(row["mismatch/probe_gap_mean"] < MAX_GAP[dtype] for row in rows)


@needs_gpus(1)
def test_sleeping_and_off_loading_change_no_number(tmp_path: Path):
    figures = []
    for sleep in (True, False):
        folder = tmp_path / str(sleep)
        folder.mkdir()
        rows = run(folder, **{"rollout.engine.sleep": sleep})
        figures.append([(row["rollout/score_mean"], row["ppo/policy_loss"]) for row in rows])
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)


@needs_gpus(1)
def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_its_weights(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from raypo.config import EngineSection
    from raypo.serving.engine import Engine
    from raypo.weights.buckets import pack
    from raypo.weights.transport import LocalTransport
    from tests.integration.test_engine import PROMPTS, gap, probes

    folder = str(tiny_policy(tmp_path))
    learner: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = Engine(
        folder,
        section=EngineSection(gpu_memory_fraction=0.3),
        dtype="float32",
        max_model_len=400,
    )
    named = learner.named_parameters(remove_duplicate=False)
    engine.load_weights(LocalTransport().send(pack(named, bucket_bytes=2**20), version=1))
    free, total = torch.cuda.mem_get_info()
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 0.2 * total
    with pytest.raises(RuntimeError, match="it sleeps"):
        engine.generate(probes(PROMPTS, 4))
    engine.wake_up()
    assert gap(learner, engine.generate(probes(PROMPTS, 40))) < MAX_GAP["float32"]
    engine.shutdown()


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One for all tests of this module: DeepSpeed keeps the first group that it sees."""
    import torch.distributed as dist

    rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@needs_gpus(1)
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_learner_off_loaded_leaves_the_gpu_and_comes_back(tmp_path: Path, stage: int, dtype: str):
    from tests.integration.learning import experience, learner, weights, with_targets

    model = str(tiny_policy(tmp_path / "m", hidden=512, layers=8))
    stayed, moved = (learner(model, stage=stage, dtype=dtype) for _ in range(2))
    batch = with_targets(stayed.with_log_probs_and_values(experience()))
    for step in (1, 2):
        before = torch.cuda.memory_allocated()
        moved.offload_training_state()
        moved.offload_parameters()
        assert torch.cuda.memory_allocated() < 0.7 * before, "one of the two is gone"
        moved.reload()
        for each in (stayed, moved):
            each.update(batch, step=step)
        kept = weights(stayed)
        assert all(torch.equal(kept[name], own) for name, own in weights(moved).items())


@needs_gpus(2)
def test_nccl_reaches_an_engine_on_another_gpu_and_survives_its_replacement(tmp_path: Path):
    import ray
    from transformers import AutoModelForCausalLM

    from raypo.collectives import Workers
    from raypo.weights.broadcast import BroadcastTransport
    from tests.integration.plain_handle import PlainHandle
    from tests.integration.test_engine import (
        MAX_MODEL_LEN,
        PROMPTS,
        SECTION,
        disturb,
        gap,
        probes,
        weights,
    )
    from tests.slow.test_weight_transports import Replica

    folder = str(tiny_policy(tmp_path))
    learner: Any = AutoModelForCausalLM.from_pretrained(folder)
    learner.cuda().eval()
    ray.init(num_gpus=2, include_dashboard=False)
    transport = BroadcastTransport(
        backend="nccl", device="cuda:0", host=ray.util.get_node_ip_address(), timeout_s=60.0
    )
    environment = {"env_vars": {"CUDA_VISIBLE_DEVICES": "1"}}
    try:
        for version in (1, 2):  # the second time to a process that knows nothing of the first
            actor: Any = ray.remote(Replica).options(runtime_env=environment).remote(
                folder, section=SECTION, dtype="float32", max_model_len=MAX_MODEL_LEN
            )  # fmt: skip
            disturb(learner)
            transport.push(
                weights(learner).items(),
                PlainHandle({"engine": actor}),
                version=version,
                workers=Workers(),
            )
            answers = ray.get(actor.generate.remote(probes(PROMPTS, 40)))
            assert gap(learner.cpu(), answers) < MAX_GAP["float32"]
            learner.cuda()
            ray.kill(actor)
    finally:
        ray.shutdown()
