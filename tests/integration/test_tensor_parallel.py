"""vLLM on several devices, here as many processes: the same numbers, and losses that are told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.config import EngineSection
from raypo.serving.engine import Engine
from raypo.weights.buckets import Bucket
from raypo.weights.manifest import WeightError
from raypo.weights.messages import PushStart
from tests.integration.test_engine import AGREES, MAX_MODEL_LEN, PROMPTS, Pair, requests
from tests.stand_ins import generate, pack
from tests.tiny import tiny_policy

SIZE = 2
LOST_S = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # Each process has a copy of the only head of keys and values, and a padded part of the 100
    # tokens: vLLM loads both in other ways than plain shards.
    made = pair_on_several(tiny_policy(tmp_path_factory.mktemp("tied"), kv_heads=1))
    yield made
    made.engine.shutdown()


def pair_on_several(folder: Path) -> Pair:
    section = EngineSection(kv_cache_gb=0.1, tensor_parallel=SIZE)
    engine = Engine(str(folder), section=section, dtype="float32", max_model_len=MAX_MODEL_LEN)
    return Pair(str(folder), engine, AutoModelForCausalLM.from_pretrained(folder).eval())


def processes_of_vllm() -> list[psutil.Process]:
    """Of this process's vLLM; they name themselves, and so do Ray's beside them."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if " ".join(child.cmdline()).startswith("VLLM::Worker")]


def test_every_push_reaches_every_process(pair: Pair):
    assert_every_push_arrives(pair)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in os.environ


def assert_every_push_arrives(pair: Pair) -> None:
    """A large change each time: what a process kept of the old weights would show."""
    torch.manual_seed(1)
    for _ in range(3):
        push = pair.push()
        received = pair.engine.load_weights(push)
        assert received == push.manifest
        completions = generate(pair.engine, requests())
        prompts = [each.prompt_ids for each in requests()]
        assert pair.gap(completions, prompts) < AGREES
        pair.disturb()


def test_a_push_that_dies_half_way_leaves_an_engine_that_refuses(pair: Pair):
    """Both processes fail at once, and both answer to the next call and not to this one."""
    engine = pair.engine
    engine.load_weights(pair.push())
    pair.disturb()
    tensors = dict(pair.learner.named_parameters(remove_duplicate=False))
    first, *_ = pack(tensors.items(), bucket_bytes=20_000)
    wrong = tuple(replace(spec, checksum=spec.checksum ^ 1) for spec in first.specs)
    engine.begin_push(PushStart(9))
    with pytest.raises(WeightError, match="checksum"):
        engine.load_bucket(Bucket(first.arrays, wrong))
    with pytest.raises(RuntimeError, match="refuses to sample"):
        generate(engine, requests(1))

    engine.load_weights(pair.push())
    assert pair.gap(generate(engine, requests(4)), PROMPTS) < AGREES


def test_it_leaves_no_shared_memory_behind_however_it_ends(pair: Pair):
    """What vLLM maps has no name any more: it goes with the processes.

    Its collective operations in shared memory are built for processors with AVX-512 only.
    """
    processes = [psutil.Process(), *processes_of_vllm()]
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in processes]
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    for shared in ("psm_", "vllm_dist_") if has_avx512 else ("psm_",):
        mapped = [
            line for each in maps for line in each.splitlines() if f"/dev/shm/{shared}" in line
        ]
        assert mapped, shared
        assert all(line.endswith("(deleted)") for line in mapped), shared


def test_its_memory_is_that_of_all_its_processes(pair: Pair):
    alone = psutil.Process().memory_info().rss / 1e9
    assert pair.engine.peak_memory()["memory"] > alone + SIZE * 0.3


def lose_a_process() -> None:
    before = processes_of_vllm()
    assert len(before) >= SIZE
    os.kill(before[-1].pid, signal.SIGKILL)


def assert_told(model: Any) -> None:
    """Within some seconds; its owner then starts another."""
    deadline = time.monotonic() + LOST_S
    while is_healthy(model) and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(RuntimeError, match="cannot go on: one of vLLM's processes has ended"):
        model.check_health()


def is_healthy(model: Any) -> bool:
    try:
        model.check_health()
    except RuntimeError:
        return False
    return True


def test_an_engine_that_has_lost_a_process_says_so(pair: Pair):
    """The last test of this engine."""
    lose_a_process()
    assert_told(pair.engine)
    with pytest.raises(RuntimeError, match="cannot go on: one of vLLM's processes has ended"):
        pair.engine.begin_push(PushStart(10))
