"""Cost of the rollout controller by itself, which says how large a cluster it can feed.

    pytest -m benchmark tests/benchmarks/test_controller_cost.py -s

Engines answer at once: 4,096 responses of 2,000 tokens to 512 prompts. Counted are the CPU time of
this process from the draw to the complete batch, and the time to deal the batch to 64 workers and
to pickle their hands, which is what `Workers.scatter` does before it sends.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace

import numpy as np
import pytest

from raypo.data.stream import ShuffledStream
from raypo.metrics.clock import Clock
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.controller import RolloutController
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.sharding import deal
from raypo.rollout.step_batch import StepBatch
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Prompt, Rollout
from tests.stand_ins import Engine, Lossy

pytestmark = pytest.mark.benchmark
PROMPTS, SAMPLES, TOKENS, PROMPT_TOKENS, WORKERS, STEPS = 512, 8, 2000, 256, 64, 3


def test_the_cost_of_the_controller_per_token():
    prompts = [
        Prompt(n, "p", np.full(PROMPT_TOKENS, n, np.int32), label="7") for n in range(PROMPTS)
    ]
    row = np.arange(TOKENS, dtype=np.int32), np.zeros(TOKENS, np.float32)

    def answers(requests: list[SamplingRequest]) -> list[Completion]:
        return [Completion(row[0].copy(), row[1].copy(), "length", 0) for _ in requests]

    sampler = Sampler(Engine(answers), Lossy(), Sampling(SAMPLES, TOKENS, 1.0, 1.0, (), seed=0))

    def sample_and_score(draws: list[Prompt], clock: Clock) -> list[Rollout]:
        return [replace(r, score=float(r.sample_index % 2)) for r in sampler.sample(draws)]

    controller = RolloutController(
        PromptSource(ShuffledStream(prompts, seed=1), SAMPLES),
        sample_and_score,  # type: ignore[arg-type]
        lambda: StepBatch(missing_groups=PROMPTS),
        num_steps=STEPS,
        prompts_per_step=PROMPTS,
    )
    controller.begin(last_step=0)
    for step in range(1, STEPS + 1):
        cpu = time.process_time()
        batch = controller.take(step).result()
        making = time.process_time() - cpu
        began = time.perf_counter()
        hands = deal(batch.trained, minibatch_size=1024, seed=(0, step), num_workers=WORKERS)
        dealing = time.perf_counter() - began
        sizes = [len(pickle.dumps(hand)) for hand in hands]
        sending = time.perf_counter() - began - dealing
        controller.arrived(step)
        num_tokens = PROMPTS * SAMPLES * TOKENS
        print(
            f"step {step}: {1e6 * making / num_tokens:.3f} us of CPU a token, {making:.2f} s a "
            f"batch; dealt to {WORKERS} workers in {dealing:.2f} s, pickled in {sending:.2f} s "
            f"({sum(sizes) / 1e6:.0f} MB)"
        )
        assert sum(map(len, hands)) == PROMPTS * SAMPLES
    controller.close()
