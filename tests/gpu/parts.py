"""The acceptance on one GPU, part by part; each part is a script that runs by itself.

    python -m tests.gpu.parts driver        # or packages, off_load, ipc, group, engine, ...

Each prints what it measured as its last line, JSON; it fails by raising. None has run on a GPU yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"hidden_size": 896, "intermediate_size": 4864, "vocab_size": 151_936}
"""Of Qwen2.5-0.5B, whose attention and vocabulary are those of models that people train."""
WRONG_GAP = 1.0
"""Nats of a single token; rounding in bfloat16 and TF32 stays below, other weights do not."""
Figures = dict[str, Any]


def driver() -> Figures:
    """torch sees the GPU, and the driver is new enough for its CUDA."""
    import torch

    from raypo.cluster.devices import check_driver
    from raypo.plan.gpus import gpu_of
    from raypo.plan.hardware import this_machine

    (node,) = this_machine()
    check_driver(gpus=node.gpus)
    assert torch.cuda.is_available(), "torch finds no GPU"
    name = torch.cuda.get_device_name()
    assert torch.ones(8, device="cuda").sum().item() == 8.0
    known = gpu_of(name)
    return {
        "gpu": name,
        "known_as": known.name if known else None,
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
    }


def packages() -> Figures:
    """What the pinned set brings can be imported together, NVML too."""
    import deepspeed
    import pynvml  # pyright: ignore[reportMissingImports]
    import ray
    import torch
    import vllm

    from raypo.serving.vllm_settings import check_version

    check_version(vllm.__version__)
    pynvml.nvmlInit()
    versions = {each.__name__: each.__version__ for each in (torch, ray, vllm, deepspeed)}
    return {**versions, "driver": pynvml.nvmlSystemGetDriverVersion()}


def off_load() -> Figures:
    """A learner leaves the GPU and comes back at every stage in both dtypes, bit for bit."""
    return _pytest("off_loaded_leaves_the_gpu")


def ipc() -> Figures:
    """20 buckets through CUDA IPC to another process, with and without expandable segments."""
    found: Figures = {}
    for name, value in (("plain", ""), ("expandable", "expandable_segments:True")):
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": value}
        if not value:
            environment.pop("PYTORCH_CUDA_ALLOC_CONF")
        command = [sys.executable, "-m", "tests.gpu.ipc_probe"]
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-2000:]}"
        found |= {f"{name}_{k}": v for k, v in json.loads(done.stdout.splitlines()[-1]).items()}
    return found


def group() -> Figures:
    """A broadcast group over NCCL, of this process alone, connects within its time-out."""
    import torch

    from raypo.weights.broadcast import Group, Rendezvous, _store

    store = _store("127.0.0.1", 0, 60.0, is_host=True)
    rendezvous = Rendezvous(1, "127.0.0.1", store.port, 1, "nccl", 60.0)
    begin = time.perf_counter()
    member = Group(rendezvous, rank=0, store=store, device="cuda:0")
    connected_s = time.perf_counter() - begin
    flat = torch.arange(1 << 20, device="cuda").view(torch.uint8)
    member.broadcast(flat, is_in_vain=lambda: False)
    member.leave()
    return {"connected_s": connected_s}


def engine(dtype: str = "bfloat16", *, layers: int = 24, device: Any = "cuda") -> Figures:
    """An engine of real attention sleeps, takes a push, wakes, and agrees with the learner."""
    import torch

    from raypo.config import EngineSection
    from raypo.serving.engine import Engine
    from raypo.weights.buckets import pack
    from raypo.weights.transport import LocalTransport
    from tests.integration.test_engine import PROMPTS, gap, probes

    found: Figures = {}
    with _model(layers=layers, dtype=dtype) as folder:
        learner = _loaded(folder, dtype, device)
        section = EngineSection(gpu_memory_fraction=0.5, kv_cache_gb=1.0)
        sampler = Engine(folder, section=section, dtype=dtype, max_model_len=400, device=device)
        begin = time.perf_counter()
        sampler.sleep()
        found["sleep_s"] = time.perf_counter() - begin
        sampler.wake_up("weights")
        begin = time.perf_counter()
        named = learner.named_parameters(remove_duplicate=False)
        sampler.load_weights(LocalTransport().send(pack(named, bucket_bytes=2**28), version=1))
        found["push_s"] = time.perf_counter() - begin
        sampler.wake_up("kv_cache")
        begin = time.perf_counter()
        answers = sampler.generate(probes(PROMPTS, 40))
        found["generate_s"] = time.perf_counter() - begin
        found["gap"] = float(gap(learner.to(device), answers))
        sampler.shutdown()
    if device == "cuda":
        found["gpu_gb"] = torch.cuda.max_memory_reserved() / 1e9
    assert found["gap"] < WRONG_GAP, found
    return found


def engine_in_float32() -> Figures:
    """The same in float32, in which attention computes in TF32: the gap says by how much."""
    return engine("float32")


def run() -> Figures:
    """A bfloat16 run at stage 3 with critic, reference and sleep, stopped and resumed."""
    return _pytest("test_one_gpu.py", "test_transports.py", but="nccl_reaches or off_loaded")


def microbatch(dtype: str = "bfloat16", *, layers: int = 24, device: str = "cuda") -> Figures:
    """The largest micro-batch that the token budget allows, beside what the plan says of it."""
    import torch

    from raypo.models.networks import Policy
    from raypo.plan import memory
    from raypo.plan.model_shape import ModelShape

    itemsize = memory.ITEMSIZE[dtype]
    batch = memory.Batch(prompts=2, responses=4, prompt_tokens=64, tokens=2 * (64 + 4 * 96))
    with _model(layers=layers, dtype=dtype) as folder:
        shape = ModelShape.read(folder)
        policy = Policy(_loaded(folder, dtype, device), temperature=1.0)
        held = _allocated(device)
        _backward(policy, batch, device)
        measured = _peak(device) - held
    saved = memory.activations(shape, batch, itemsize=itemsize)
    planned = saved + memory.logits(shape, batch, itemsize=itemsize, copies=2)
    planned += shape.parameters * itemsize  # the gradients of this one pass
    found = {"planned_gb": planned / 1e9, "measured_gb": measured / 1e9}
    if device == "cuda":
        torch.cuda.synchronize()
        assert measured < 1.3 * planned, found
    return found


PARTS: dict[str, Callable[[], Figures]] = {
    each.__name__: each
    for each in (
        driver,
        packages,
        off_load,
        ipc,
        group,
        engine,
        engine_in_float32,
        run,
        microbatch,
    )
}


@contextmanager
def _model(*, layers: int, dtype: str) -> Iterator[str]:
    """A random Qwen2 of real widths on disk, with a tokenizer beside it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from tests.tiny import tiny_tokenizer

    torch.manual_seed(0)
    config = Qwen2Config(
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **SIZES,
    )
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer(folder)
        model: Any = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
        model.save_pretrained(folder)
        yield folder


def _loaded(folder: str, dtype: str, device: str) -> Any:
    from raypo.models.loading import load_causal_lm

    return load_causal_lm(folder, dtype=dtype).to(device)


def _backward(policy: Any, batch: Any, device: str) -> None:
    """One pass over that batch."""
    import torch

    from raypo.types import Experience

    count = batch.prompts * batch.responses
    length = batch.tokens // batch.prompts - batch.prompt_tokens
    response = length // batch.responses
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4, 60, (batch.prompts, batch.prompt_tokens), generator=generator)
    ones = torch.ones(count, response, dtype=torch.bool)
    experience = Experience(
        prompt_ids=prompts.repeat_interleave(batch.responses, 0),
        prompt_mask=torch.ones(count, batch.prompt_tokens, dtype=torch.bool),
        response_ids=torch.randint(4, 60, (count, response), generator=generator),
        attention_mask=ones,
        response_mask=ones,
        rollout_log_probs=torch.zeros(count, response),
        scores=torch.zeros(count),
        group_index=torch.arange(count) // batch.responses,
        minibatch=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        weight_version=torch.zeros(count, dtype=torch.int64),
    )
    log_probs, _ = policy(experience.to(torch.device(device)))
    log_probs.sum().backward()


def _allocated(device: str) -> int:
    import torch

    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _pytest(*selected: str, but: str = "") -> Figures:
    """Some of tests/gpu; by a part of a test's name, or by files."""
    files = [f"tests/gpu/{name}" for name in selected if name.endswith(".py")] or ["tests/gpu"]
    names = [name for name in selected if not name.endswith(".py")]
    expression = " or ".join(names) or f"not ({but})"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", expression, *files]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    assert done.returncode == 0, f"{last}\n{done.stdout[-3000:]}"
    assert "passed" in last, f"nothing was run: {last}"
    return {"pytest": last}


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]]()))
