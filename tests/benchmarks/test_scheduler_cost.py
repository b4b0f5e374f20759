"""CPU time of the engine's thread per sampled token, under raypo's scheduler and under vLLM's own.

    pytest -m benchmark tests/benchmarks/test_scheduler_cost.py -s

vLLM without a model (`tests/without_model.py`) samples 256 responses of 512 tokens with log-probs,
one step ahead of its outputs as on GPUs, where this thread bounds the sampling of small models.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import numpy as np

from raypo.serving.inside_vllm import InsideVllm, sampled
from raypo.serving.requests import SamplingRequest
from raypo.serving.vllm_requests import completion_of, sampling_params, vllm_prompt
from tests.tiny import tiny_policy
from tests.without_model import start_without_model

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 8, 256, 512
ROUNDS = 5
MOST = 0.6


class Sampling:
    """A vLLM without a model, and the CPU time of its last batch without that of its tokens."""

    def __init__(self, folder: str, is_lean: bool) -> None:
        llm = start_without_model(
            folder,
            is_lean=is_lean,
            is_ahead=True,
            blocks=PROMPTS * SAMPLES * (PROMPT_TOKENS + NEW_TOKENS) // 16 + 100,
            block_size=16,
            max_model_len=PROMPT_TOKENS + NEW_TOKENS,
            max_num_seqs=PROMPTS * SAMPLES,
            max_num_batched_tokens=16384,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
        )
        self._inside = InsideVllm(llm)
        self._executor = llm.llm_engine.engine_core.engine_core.model_executor
        generator = np.random.default_rng(0)
        tokens = generator.integers(4, 90, PROMPTS * SAMPLES).tolist()
        log_probs = -generator.random(PROMPTS * SAMPLES, np.float32)
        self._executor.sample = lambda _, count: (tokens[:count], log_probs[:count])
        self._model_s = 0.0
        execute = self._executor.execute_model

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            output = execute(*args, **kwargs)
            self._model_s += time.thread_time() - begin
            return output

        self._executor.execute_model = timed

    def batch(self, round: int) -> float:
        """Sample new prompts; return the CPU time in seconds."""
        generator = np.random.default_rng(round)
        prompts = generator.integers(4, 90, (PROMPTS, PROMPT_TOKENS), np.int32)
        requests = [
            SamplingRequest(prompt, NEW_TOKENS, 1.0, seed=seed)
            for prompt in prompts
            for seed in range(SAMPLES)
        ]
        self._model_s, begin, ended = 0.0, time.thread_time(), 0
        names = self._inside.enqueue(
            [vllm_prompt(request) for request in requests],
            [sampling_params(request) for request in requests],
            [None] * len(requests),
            [0] * len(requests),
        )
        scheduled = {name: self._inside.scheduled(name) for name in names}
        while ended < len(requests):
            for output in self._inside.step():
                (said,) = output.outputs
                ids, log_probs = sampled(scheduled[output.request_id], said.logprobs)
                ended += len(completion_of(ids, log_probs, said.finish_reason).log_probs) > 0
        return time.thread_time() - begin - self._model_s


def test_raypos_scheduler_takes_less_cpu_time_than_vllms(tmp_path):
    folder = str(tiny_policy(tmp_path, max_position_embeddings=1024))
    lean, vllms_own = (Sampling(folder, is_lean) for is_lean in (True, False))
    pairs = [(lean.batch(number), vllms_own.batch(number)) for number in range(ROUNDS + 1)][1:]
    ratio = median(own / usual for own, usual in pairs)
    own, usual = (median(seconds) for seconds in zip(*pairs, strict=True))
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    print(f"\nraypo's {own:.2f} s ({own / tokens * 1e6:.1f} us a token), vLLM's {usual:.2f} s "
          f"({usual / tokens * 1e6:.1f} us), ratio {ratio:.2f}")  # fmt: skip
    assert ratio <= MOST
