"""vLLM's own code for GPUs takes what raypo gives it, on a machine without one.

It is the Python of the GPU build: of the installed CPU build, which has the same files, or of the
unpacked wheel that RAYPO_VLLM names (`scripts/gpu_build.sh`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypo.serving.vllm_processes import GREW, WorkerExtension
from tests.tiny import tiny_policy

HERE = Path(__file__).parent
DTYPES = ("bfloat16", "float32")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tiny_policy(tmp_path_factory.mktemp("policy"))
    vllm = os.environ.get("RAYPO_VLLM", "")
    python_path = [HERE / "as_on_gpus", *filter(None, [vllm]), HERE.parents[1]]
    result = subprocess.run(
        [sys.executable, HERE / "gpu_engine_probe.py", model],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, python_path)), "CUDA_VISIBLE_DEVICES": "0,1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def engine(told: dict[str, Any], name: str, **expected: Any) -> None:
    """Check what vLLM made of an engine's arguments, in both dtypes."""
    for dtype in DTYPES:
        made = told["engines"][f"{dtype} {name}"]
        wanted = {"dtype": dtype} | expected
        assert {key: made[key] for key in wanted} == wanted, made
        assert made["worker"] == "vllm.v1.worker.gpu_worker.Worker"
        assert made["extension"] == "raypo.serving.vllm_processes.WorkerExtension"


def test_an_engine_on_gpus_is_what_its_section_says(told: dict[str, Any]):
    own = {"logprobs": "processed_logprobs", "policy": "priority"}
    engine(told, "default", sleeps=True, memory=0.5, devices=1, executor="uni", rank=None, **own)
    engine(told, "default", prefix_caching=True, sequences=1024, kv_bytes=None)  # of 80 GB
    engine(told, "no sleep", sleeps=False, prefix_caching=False, **own)
    engine(told, "undecided", sleeps=False, **own)
    engine(told, "two GPUs", sleeps=True, devices=2, executor="mp", **own)
    engine(told, "sized", kv_bytes=1_500_000_000, memory=0.01, sequences=64)
    engine(told, "probes", sequences=1032)
    engine(told, "reads text", sequences=1024)


def test_an_engine_of_whole_batches_captures_few_graphs(told: dict[str, Any]):
    few = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    engine(told, "batches", graphs="FULL_DECODE_ONLY", sizes=few)
    engine(told, "few sequences", graphs="FULL_DECODE_ONLY", sizes=[1, 2, 4, 8, 16, 20])
    engine(told, "own graphs", graphs="FULL_AND_PIECEWISE", sizes=[1, 2])
    engine(told, "default", graphs="FULL_AND_PIECEWISE")
    assert len(told["engines"]["bfloat16 default"]["sizes"]) > 2 * len(few)


def test_an_engine_of_adapters_holds_them_on_one_gpu_and_on_two(told: dict[str, Any]):
    attention = ["k_proj", "o_proj", "q_proj", "v_proj"]
    targets = sorted([*attention, "down_proj", "gate_proj", "up_proj"])
    for name, devices in (("adapters", 1), ("adapters on two GPUs", 2)):
        engine(told, name, rank=16, adapters=3, targets=targets, devices=devices, sleeps=True)


def test_frozen_models_sleep_and_keep_no_prefixes(told: dict[str, Any]):
    for name, devices in (("frozen", 1), ("frozen on two GPUs", 2)):
        engine(
            told, name, sleeps=True, prefix_caching=False, devices=devices, logprobs="raw_logprobs"
        )


def test_the_second_model_runner_starts_without_flashinfer(told: dict[str, Any]):
    """Its sampler imports flashinfer. It runs dense Llamas in 0.23, and all models in 0.32."""
    assert told["uses_flashinfer"] is False
    engine(told, "default", model_runner=2)


def test_the_process_that_asks_for_memory_gets_no_cuda_context(told: dict[str, Any]):
    assert told["has_cuda_context"] is False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_goes_to_sleep_while_another_process_takes_memory(monkeypatch, caplog):
    """vLLM's own `Worker.sleep`; of 15 free bytes another process takes 5 meanwhile."""
    from vllm.v1.worker import gpu_worker

    both = type("Both", (gpu_worker.Worker, WorkerExtension), {})  # as vLLM mixes extensions in
    slept: list[int] = []
    allocator = SimpleNamespace(suspend=slept.append, sleep=lambda **_: slept.append(1))
    worker: Any = object.__new__(both)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enable_nccl_comm_suspend=False)
    )
    worker._sleep_mode_backend = allocator
    monkeypatch.setattr(gpu_worker, "get_mem_allocator_instance", lambda: allocator, raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    free = itertools.cycle([(15, 20), (10, 20)])
    for module, function in ((torch.accelerator, "get_memory_info"), (torch.cuda, "mem_get_info")):
        monkeypatch.setattr(module, function, lambda: next(free))

    with pytest.raises(AssertionError, match=GREW):
        worker.sleep(level=1)
    worker.raypo_share_device()
    worker.sleep(level=1)
    assert slept == [1, 1]
    assert "another process has allocated" in caplog.text

    def fails(level: int) -> None:
        raise AssertionError("something else")

    worker.sleep = fails
    worker.raypo_share_device()
    with pytest.raises(AssertionError, match="something else"):
        worker.sleep(level=1)
