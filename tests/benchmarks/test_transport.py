"""The object transport on one node against copying the same bytes once, in the same run.

    pytest -m benchmark tests/benchmarks/test_transport.py -s

Transport is everything but vLLM's own repacking of the tensors, which is stated apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from raypo.collectives import Workers
from raypo.config import EngineSection
from raypo.serving.engine import Engine
from raypo.weight_sync.transport import ObjectTransport
from raypo.weights.buckets import unpack
from raypo.weights.manifest import Manifest
from raypo.weights.messages import PushStart, Ready, StoredBucket
from tests.integration.plain_handle import plain_client
from tests.tiny import tiny_policy

TENSOR_WORDS = 1 << 20
"""Of float32: tensors of 4 MB."""
ROUNDS = 12
MOST = 3.0


class Receiver:
    """What an engine does with a push up to the moment at which vLLM gets the tensors."""

    def begin_push(self, start: PushStart) -> Ready:
        self._arrived: list[Any] = []
        return Ready(1, None)

    def load_bucket(self, bucket: StoredBucket) -> None:
        fetched = bucket.fetch()
        for _ in unpack(fetched, verify=True):
            pass
        self._arrived += fetched.specs

    def finish_push(self, manifest: Manifest) -> Manifest:
        return Manifest.of(manifest.version, self._arrived)


def fastest(run: Callable[[], None]) -> float:
    """Seconds of the fastest of several rounds; the first ones touch the memory."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.fixture(scope="module", autouse=True)
def ray_session() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def push_seconds(tensors: dict[str, torch.Tensor], actor: Any) -> float:
    transport = ObjectTransport()
    client = plain_client({"receiver": actor})
    return fastest(lambda: transport.push(tensors.items, client, version=1, workers=Workers()))


@pytest.mark.parametrize("num_tensors", [64, 128], ids=["one-bucket", "two-buckets"])
def test_transport_takes_at_most_three_copies(num_tensors: int):
    tensors = {f"w{i}": torch.randn(TENSOR_WORDS) for i in range(num_tensors)}
    copies = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    actor: Any = ray.remote(Receiver).options(num_cpus=0).remote()

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    copy_s, push_s = fastest(copy), push_seconds(tensors, actor)
    gigabytes = num_tensors * TENSOR_WORDS * 4 / 1e9
    print(f"\ncopying once {gigabytes / copy_s:.2f} GB/s, transport {gigabytes / push_s:.2f} GB/s")
    print(f"transport takes {push_s / copy_s:.2f} copies")
    ray.kill(actor)
    assert push_s <= MOST * copy_s


def test_what_vllm_adds_is_stated_apart(tmp_path: Path):
    folder = str(tiny_policy(tmp_path, hidden=512, layers=12, head_dim=64))
    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    receiver: Any = ray.remote(Receiver).options(num_cpus=0).remote()
    section = EngineSection(kv_cache_gb=0.1)
    engine: Any = ray.remote(Engine).options(num_cpus=0).remote(
        folder, section=section, dtype="float32", max_model_len=64
    )  # fmt: skip
    transport_s, whole_s = push_seconds(tensors, receiver), push_seconds(tensors, engine)
    megabytes = sum(t.nbytes for t in tensors.values()) / 1e6
    print(
        f"\n{megabytes:.0f} MB: transport {transport_s:.3f} s, with vLLM's reload {whole_s:.3f} s"
    )
    for actor in (receiver, engine):
        ray.kill(actor)
    assert transport_s < whole_s
