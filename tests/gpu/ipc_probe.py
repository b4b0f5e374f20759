"""Twenty buckets from this process to another one by CUDA IPC; prints seconds and bytes, JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from raypo.weights.buckets import stage, unpack
from raypo.weights.messages import IpcBucket

BUCKETS, BUCKET_BYTES = 20, 64 * 2**20


def receive(offered: Any, answers: Any) -> None:
    """Take each bucket over, and say its sum."""
    device = torch.device("cuda", 0)
    while (bucket := offered.get()) is not None:
        staged = bucket.read("here", device)
        tensors = dict(unpack(staged, verify=True))
        answers.put(sum(float(each.double().sum()) for each in tensors.values()))


def main() -> None:
    from raypo.weights.messages import CudaHandle

    context: Any = mp.get_context("spawn")
    offered, answers = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(offered, answers))
    receiver.start()
    size = BUCKET_BYTES // 4
    named = (
        (f"w{number}", torch.randn(size, device="cuda").contiguous()) for number in range(BUCKETS)
    )
    begin = time.perf_counter()
    for staged in stage(named, bucket_bytes=BUCKET_BYTES, device="cuda"):
        torch.cuda.synchronize()
        expected = sum(float(each.double().sum()) for _, each in unpack(staged))
        offered.put(IpcBucket({"here": CudaHandle.of(staged.flat)}, staged.entries))
        answer = answers.get(timeout=60)
        assert answer == expected, (answer, expected)
    seconds = time.perf_counter() - begin
    offered.put(None)
    receiver.join(60)
    torch.cuda.ipc_collect()
    print(json.dumps({"buckets": BUCKETS, "seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
