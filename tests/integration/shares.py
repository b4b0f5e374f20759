"""A random model on disk, and the workers that load it in shares, each a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.every_model import CAUSAL, build
from tests.integration.task import REPOSITORY

BUCKET_BYTES = 32 << 20
SLACK_BYTES = 48 << 20
"""Of the allocator, of gloo and of Python."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""glibc else keeps what is freed, and what a process holds could not be told from what it held."""


@dataclass(frozen=True)
class Outcome:
    """What the workers found, by rank."""

    parameters: int
    largest: int
    peaks: list[dict[str, int]]
    sums: list[dict[str, int]]
    heads: list[list[float]]
    """The value head that starts at twice a reward model's score head."""

    def bound(self, workers: int, bytes_each: int) -> int:
        """A worker's share of all, what is whole for a moment, and the allocator's."""
        return self.parameters * bytes_each // workers + 2 * self.largest * 2 + SLACK_BYTES


def write_model(folder: Path, **sizes: Any) -> tuple[int, int]:
    """A Llama of random weights in bfloat16; its weights, and the largest of them, in elements."""
    values: dict[str, Any] = {"vocab_size": 8192, "num_attention_heads": 8, **sizes}
    config = LlamaConfig(**values)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    model.save_pretrained(folder)
    numbers = [parameter.numel() for parameter in model.parameters()]
    return sum(numbers), max(numbers)


def run_workers(
    folder: Path, count: int, *, timeout_s: float, lora: dict[str, Any] | None = None, **sizes: int
) -> Outcome:
    """Load, push and export in so many processes.

    Args:
        lora: Of the model; None: all weights are trained, and have masters and moments.
    """
    build(CAUSAL, "apertus", folder / "small")  # its files have buffers
    values: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_labels": 1}
    small = LlamaConfig(vocab_size=64, **values)
    LlamaForSequenceClassification(small).save_pretrained(folder / "reward")
    parameters, largest = write_model(folder / "model", **sizes)
    task = {
        "model": str(folder / "model"),
        "small_model": str(folder / "small"),
        "reward_model": str(folder / "reward"),
        "bucket_bytes": BUCKET_BYTES,
        "lora": lora,
        "out": str(folder),
    }
    (folder / "task.json").write_text(json.dumps(task))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.shares_probe", str(folder / "task.json")],
            cwd=REPOSITORY,
            env={**kept, **GIVEN_BACK, **address, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors = [process.communicate(timeout=timeout_s)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(errors)
    found = json.loads((folder / "result.json").read_text())
    return Outcome(parameters, largest, *map(list, zip(*found, strict=True)))


def assert_no_whole_model(outcome: Outcome, *, trained: bool = True) -> None:
    """Of weights, moments, pushed buckets and exported files, each worker had its share.

    Args:
        trained: All weights have masters and moments.
    """
    workers, whole = len(outcome.peaks), 2 * outcome.parameters
    for rank, peaks in enumerate(outcome.peaks):
        told = f"rank {rank}: { ({name: size >> 20 for name, size in peaks.items()}) } MiB"
        assert peaks["load"] < outcome.bound(workers, 2) < whole, told
        assert peaks["learner"] < outcome.bound(workers, 2 + 12 * trained), told
        assert peaks["push"] < BUCKET_BYTES + outcome.bound(workers, 0) < whole, told
        assert peaks["export"] < 2 * BUCKET_BYTES + outcome.bound(workers, 0) < whole, told
    assert all(sums == outcome.sums[0] for sums in outcome.sums)
