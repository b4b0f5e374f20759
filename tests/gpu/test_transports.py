"""Pushes to real engines by each transport, sleeping engines, and a learner off-loaded for real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.needs import needs_gpus
from tests.integration.task import read_metrics, write_task
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

MAX_GAP = 0.15
"""Nats of a token on average, in bfloat16. In float32 attention computes in TF32 on GPUs, so that
runs keep to no bound that is worth a test: the acceptance tells how far it is."""


def run(folder: Path, **overrides: Any) -> list[dict[str, Any]]:
    from raypo import PPOConfig, PPOTrainer

    keys = {
        "num_steps": 2,
        "model.dtype": "bfloat16",
        "learner.use_gpu": True,
        "rollout.engine.gpu_memory_fraction": 0.3,
        "rollout.engine.sleep": True,  # so small a model would never leave the GPU
    }
    config = PPOConfig.load(write_task(folder), keys | overrides)
    result = PPOTrainer(config).fit()
    assert result.return_value == {"status": "finished", "step": 2}
    rows = read_metrics(folder / "runs" / "tiny")
    assert all(row["mismatch/probe_gap_mean"] < MAX_GAP for row in rows)
    assert all(row["ppo/skipped_updates"] == 0 for row in rows)
    return rows


@needs_gpus(1)
@pytest.mark.parametrize("transport", ["ipc", "object"])
@pytest.mark.parametrize("sleep", [True, False])
def test_a_colocated_run_agrees_by_each_transport_asleep_and_awake(
    tmp_path: Path, transport: str, sleep: bool
):
    run(tmp_path, **{"rollout.engine.transport": transport, "rollout.engine.sleep": sleep})


@needs_gpus(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_colocated_run_agrees_at_each_stage(tmp_path: Path, stage: int):
    run(tmp_path, **{"learner.zero_stage": stage})


LOSS = """
import os, signal
from pathlib import Path

import ray

LOST = Path({lost!r})

def loss(tokens):
    if not LOST.exists():  # where it is first computed the learner has the GPU
        engine = ray.get_actor("raypo:tiny:engine:0", "raypo")
        os.kill(ray.get(engine.status.remote()).pid, signal.SIGKILL)
        LOST.touch()
    return -tokens.log_ratio.exp() * tokens.advantages
"""


@needs_gpus(1)
def test_an_engine_that_is_lost_while_the_learner_updates_comes_back_in_its_turn(tmp_path: Path):
    lost = tmp_path / "lost"
    (tmp_path / "loss.py").write_text(LOSS.format(lost=str(lost)))
    run(tmp_path, **{"ppo.policy_loss": f"{tmp_path}/loss.py:loss"})
    assert lost.exists()


@needs_gpus(1)
def test_an_adapter_is_pushed_beside_its_base(tmp_path: Path):
    run(tmp_path, **{"model.lora": {"rank": 4, "push": "adapter"}})


@needs_gpus(1)
def test_sleeping_and_off_loading_change_no_number(tmp_path: Path):
    figures = []
    for sleep in (True, False):
        folder = tmp_path / str(sleep)
        folder.mkdir()
        rows = run(folder, **{"rollout.engine.sleep": sleep})
        figures.append((rows[0]["rollout/score_mean"], rows[0]["ppo/policy_loss"]))
    assert figures[0] == pytest.approx(figures[1], rel=0.05, abs=0.01)  # bfloat16 rounds anew


@needs_gpus(1)
def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_its_weights(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    from raypo.config import EngineSection
    from raypo.serving.engine import Engine
    from tests.integration.test_engine import PROMPTS, gaps, probes

    folder = str(tiny_policy(tmp_path))
    learner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    engine = Engine(
        folder,
        section=EngineSection(gpu_memory_fraction=0.3, sleep=True),
        dtype="bfloat16",
        max_model_len=400,
    )
    named = learner.named_parameters(remove_duplicate=False)
    engine.load_weights(local_push(pack(named, bucket_bytes=2**20), version=1))
    free, total = torch.cuda.mem_get_info()
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free > 0.2 * total
    with pytest.raises(RuntimeError, match="asleep"):
        generate(engine, probes(PROMPTS, 4))
    engine.wake_up()
    assert gaps(learner, generate(engine, probes(PROMPTS, 40))).mean() < MAX_GAP
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
    from tests.integration.learning import learner
    from tests.integration.off_load import comes_back

    model = str(tiny_policy(tmp_path / "m", hidden=512, layers=8))
    empty = torch.cuda.memory_allocated()
    told = {"zero_optimization": {"stage": stage}}  # a worker alone is given another stage
    moved = learner(model, stage=stage, dtype=dtype, deepspeed=told)
    held = torch.cuda.memory_allocated() - empty
    moved.offload_training_state()
    moved.offload_parameters()
    assert torch.cuda.memory_allocated() - empty < 0.1 * held
    moved.reload()
    assert torch.cuda.memory_allocated() - empty > 0.9 * held
    comes_back(model, stage=stage, dtype=dtype)
