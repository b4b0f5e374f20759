"""One of several gloo workers that load, push and export a model in shares, and watch their memory.

Run as a process of its own: python -m tests.integration.shares_probe TASK.json
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raypo.collectives import Workers
from raypo.config import LearnerSection, ModelSection, PPOSection

POLL_S = 0.002


def anonymous_bytes() -> int:
    """Memory of this process that is no file's; pages of a file that is mapped come and go."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("Linux tells RssAnon")


@contextmanager
def peak(found: dict[str, int], name: str) -> Iterator[None]:
    """The most that was held meanwhile, over what was held before."""
    before, done, most = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not done.wait(POLL_S):
            most[0] = max(most[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found[name] = max(most[0], anonymous_bytes() - before)


def main() -> None:
    from raypo.learner import export
    from raypo.learner.deepspeed_internals import import_deepspeed
    from raypo.learner.learner import Learner
    from raypo.learner.trained_model import in_shares
    from raypo.models.critic import Critic, CriticStart
    from raypo.models.loading import load_causal_lm
    from raypo.weights.buckets import stage

    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    workers, found = Workers.current(), dict[str, int]()
    import_deepspeed()
    section = LearnerSection(zero_stage=3)
    export.SHARD_BYTES = task["bucket_bytes"]
    with in_shares(section, dtype="bfloat16", workers=workers):
        load_causal_lm(task["small_model"], dtype="bfloat16")  # what is imported is no model
        start = CriticStart(task["reward_model"], reward_weight=2.0)
        critic, _ = Critic.load(start, dtype="bfloat16")
    assert all(hasattr(each, "ds_id") for each in critic.backbone.parameters())
    head = critic.value_head.weight.flatten().tolist()
    _fails_together(task["small_model"], section, workers)
    with peak(found, "load"), in_shares(section, dtype="bfloat16", workers=workers):
        model = load_causal_lm(task["model"], dtype="bfloat16")
    assert all(hasattr(each, "ds_id") for each in model.parameters())
    del model
    gc.collect()
    with peak(found, "learner"):
        learner = Learner(
            ModelSection.model_validate(
                {"policy": task["model"], "dtype": "bfloat16", "lora": task["lora"]}
            ),
            PPOSection.model_validate({"advantage": "grpo", "kl": {"coef": 0.0}}),
            section,
            temperature=1.0,
            max_new_tokens=8,
            num_steps=1,
            seed=0,
            workers=workers,
        )
    sums = {}
    with peak(found, "push"):
        for bucket in stage(learner.named_weights(), bucket_bytes=task["bucket_bytes"]):
            sums |= {spec.name: spec.checksum for spec in bucket.specs}
    with peak(found, "export"):
        learner.policy_export(_NoTokenizer()).save(Path(task["out"]) / "policy", learner._workers)
    results = workers.gather((found, sums, head))
    del learner
    _learns_from_examples(task["small_model"], workers)
    if workers.rank == 0:
        (Path(task["out"]) / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def _fails_together(model: str, section: LearnerSection, workers: Workers) -> None:
    """Packed attention fails on one worker: no other worker waits for its weights."""
    from raypo.learner.trained_model import in_shares
    from raypo.models import packed_attention
    from raypo.models.loading import load_causal_lm

    own = packed_attention.packed_inputs

    def packed_inputs(packed: Any) -> dict[str, Any]:
        if workers.rank == 1:
            raise RuntimeError("no memory")
        return own(packed)

    packed_attention.packed_inputs = packed_inputs
    with (
        warnings.catch_warnings(record=True) as caught,
        in_shares(section, dtype="bfloat16", workers=workers),
    ):
        failed = load_causal_lm(model, dtype="bfloat16")
    packed_attention.packed_inputs = own
    assert not packed_attention.reads_packed(failed)
    told = " ".join(str(each.message) for each in caught)
    where = "RuntimeError: no memory" if workers.rank == 1 else "learner worker 1: RuntimeError"
    assert where in told, told
    with in_shares(section, dtype="bfloat16", workers=workers):
        assert packed_attention.reads_packed(load_causal_lm(model, dtype="bfloat16"))


def _learns_from_examples(model: str, workers: Workers) -> None:
    """One update of an sft run, whose policy lies in shares before DeepSpeed sees it."""
    from raypo.cluster.run_monitor import MonitorClient
    from raypo.config import SFTConfig
    from raypo.learner.tasks import ResponseTask
    from raypo.models.loading import load_causal_lm
    from raypo.models.lora import load_policy
    from raypo.run.supervised_learner import new_learner
    from raypo.types import Example

    values = {
        "name": "sft",
        "num_steps": 1,
        "model": {"policy": model, "dtype": "bfloat16"},
        "data": {"prompts": "rows.jsonl", "response_key": "response"},
        "learner": {"zero_stage": 3},
    }
    tell = MonitorClient(None)
    run: Any = SimpleNamespace(config=SFTConfig.parse(values), workers=workers, tell=tell)

    def make_task() -> Any:
        task = ResponseTask(load_policy(run.config.model))
        assert all(hasattr(each, "ds_id") for each in task.network.parameters())
        return task

    learner = new_learner(run, make_task)
    expected = dict(load_causal_lm(model, dtype="bfloat16").named_buffers())
    found = dict(learner.task.network.named_buffers())
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():  # as rotary frequencies, which stay float32
        assert buffer.dtype == found[name].dtype, name
        assert torch.equal(buffer, found[name]), name
    example = Example(np.arange(4, 8, dtype=np.int32), np.arange(8, 12, dtype=np.int32))
    metrics = learner.update([example], step=1)
    assert metrics["train/examples"] == workers.count
    assert metrics["train/skipped_updates"] == 0.0
    pushed = dict(learner.named_weights())
    stored = [name for name in learner.task.network.state_dict() if name in found]
    assert len(stored) == 8  # of four layers
    for name in stored:
        assert torch.equal(pushed[name], found[name]), name


class _NoTokenizer:
    def save_pretrained(self, folder: Path) -> None:
        pass


if __name__ == "__main__":
    main()
