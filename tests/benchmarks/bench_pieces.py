"""One measured thing in a process of its own: `python -m tests.benchmarks.bench_pieces NAME JSON`.

JSON is the work: model, dtype, prompts, samples, prompt_tokens, new_tokens, threads, repeats. The
last line is a JSON object of seconds: the shortest of the repeats, after one that does not count.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from raypo.types import Experience, Rollout


def number_of_letters(rollouts: list[Rollout]) -> list[float]:
    """The reward of the benchmark's runs."""
    return [float(len(rollout.response)) for rollout in rollouts]


def now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def shortest(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        begin = now()
        work()
        times.append(now() - begin)
    return min(times[1:])


def token_ids(work: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Prompts [G, P] and responses [G, n, T]; any tokens, for seconds do not depend on them."""
    random = torch.Generator().manual_seed(0)
    prompts, samples, new = work["prompts"], work["samples"], work["new_tokens"]
    most = work.get("vocab", 40000)
    read = torch.randint(100, most, (prompts, work["prompt_tokens"]), generator=random)
    return read, torch.randint(100, most, (prompts, samples, new), generator=random)


def vllm(work: dict[str, Any]) -> dict[str, float]:
    """vLLM as it is, in this process: start and one batch of all responses.

    `generate_s` is with log-probs and a seed for each request, as raypo asks; `prices` in the work
    adds the seconds without one of the two, and without both.
    """
    begin = time.perf_counter()
    from raypo.serving.vllm_settings import prepare_environment

    on_gpu = work.get("device") == "cuda"
    prepare_environment(eager=not on_gpu)
    from vllm import LLM, SamplingParams

    memory: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    if on_gpu:
        memory = {"gpu_memory_utilization": work["fraction"]}
    llm = LLM(
        work["model"],
        dtype=work["dtype"],
        max_model_len=work["prompt_tokens"] + work["new_tokens"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni",
        max_num_seqs=work["prompts"] * work["samples"],
        **memory,
    )
    found = {"start_s": time.perf_counter() - begin}
    read, _ = token_ids(work)
    prompts: list[Any] = []
    for ids in read.tolist():
        prompts += [{"prompt_token_ids": ids}] * work["samples"]

    def generate(*, seeds: bool = True, log_probs: bool = True) -> None:
        llm.reset_prefix_cache()
        settings = [
            SamplingParams(
                temperature=1.0,
                max_tokens=work["new_tokens"],
                ignore_eos=True,
                logprobs=0 if log_probs else None,
                flat_logprobs=log_probs,
                seed=seed if seeds else None,
                detokenize=False,
            )
            for seed in range(len(prompts))
        ]
        llm.generate(prompts, settings, use_tqdm=False)

    if not work["repeats"]:  # only its start is wanted
        return found
    found["generate_s"] = shortest(work["repeats"], generate)
    if work.get("prices"):
        without = {"seeds": {"log_probs": False}, "log_probs": {"seeds": False}}
        without["plain"] = {"log_probs": False, "seeds": False}
        for name, how in without.items():
            found[f"{name}_s"] = shortest(work["repeats"], lambda how=how: generate(**how))
    return found


EVERY = slice(None)


class Bare:
    """A plain PyTorch loop: a row a group, `prompt | response 1 | ...`, all of one length.

    Nothing is padded, no prompt is read twice, and the head reads what is predicted only. On CPU
    all groups are one batch, on a GPU each is a micro-batch, or its logits would not fit.
    """

    def __init__(self, work: dict[str, Any], *, learning: bool, values: bool = False) -> None:
        """A policy, or with `values` a critic: the same network with a head of one number."""
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, work["dtype"])
        on_gpu = work.get("device") == "cuda"
        torch.set_default_device("cuda" if on_gpu else "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype)
        prompts, responses = (each.to(self.model.device) for each in token_ids(work))
        self.pieces = [slice(i, i + 1) for i in range(len(prompts))] if on_gpu else [EVERY]
        _, samples, new = responses.shape
        width = prompts.shape[1]
        self.ids = torch.cat([prompts, responses[:, :, :-1].flatten(1)], 1)  # [G, L]
        own = torch.arange(width, width + new - 1)
        self.positions = torch.cat([torch.arange(width), own.repeat(samples)])[None]
        part = torch.cat(
            [torch.zeros(width), torch.arange(1, samples + 1).repeat_interleave(new - 1)]
        )
        order = torch.arange(len(part))
        sees = (part[:, None] == part) | (part == 0)
        self.mask = (sees & (order[:, None] >= order))[None, None]
        before = width + torch.arange(samples)[:, None] * (new - 1) + torch.arange(new - 1)
        first = torch.full((samples, 1), width - 1)
        self.states = torch.cat([first, before], 1).flatten()  # [n T]
        self.targets = responses.flatten(1)  # [G, n T]
        if values:
            self.model.lm_head = torch.nn.Linear(self.model.config.hidden_size, 1, dtype=dtype)
        self.answers = self.values if values else self.log_probs
        if learning:
            self.weights = list(self.model.parameters())
            is_rounded = dtype == torch.bfloat16
            self.masters = [w.detach().float() for w in self.weights] if is_rounded else None
            self.optimizer = torch.optim.AdamW(self.masters or self.weights, lr=1e-6, fused=True)

    def log_probs(self, groups: slice = EVERY) -> Tensor:
        targets = self.targets[groups].flatten()
        return -cross_entropy(self.outputs(groups).float(), targets, reduction="none")

    def values(self, groups: slice = EVERY) -> Tensor:
        return self.outputs(groups).float().squeeze(-1)

    def forward(self) -> None:
        for groups in self.pieces:
            self.answers(groups)

    def outputs(self, groups: slice) -> Tensor:
        hidden = self.model.model(
            input_ids=self.ids[groups],
            position_ids=self.positions,
            attention_mask=self.mask,
            use_cache=False,
        ).last_hidden_state
        return self.model.lm_head(hidden[:, self.states]).flatten(0, 1)

    def backward(self) -> None:
        for groups in self.pieces:
            answers = self.answers(groups)
            ((answers - answers.detach()).exp().sum() / -self.targets.numel()).backward()

    def step(self) -> None:
        if self.masters is not None:
            for master, weight in zip(self.masters, self.weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            self.optimizer.step()
            with torch.no_grad():
                for master, weight in zip(self.masters, self.weights, strict=True):
                    weight.copy_(master)
        else:
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
            self.optimizer.step()
        self.model.zero_grad()


def bare(work: dict[str, Any]) -> dict[str, float]:
    """Forward without gradients, and an update: forward, backward, clipping, fused AdamW.

    With `critic` in the work a critic's passes and update are added.
    """
    loops = [Bare(work, learning=True)]
    if work.get("critic"):
        loops.append(Bare(work, learning=True, values=True))
    with torch.no_grad():
        forward_s = sum(shortest(work["repeats"], loop.forward) for loop in loops)
    backward, step = [], []
    for _ in range(work["repeats"] + 1):
        times = [now()]
        for part in (Bare.backward, Bare.step):
            for loop in loops:
                part(loop)
            times.append(now())
        backward.append(times[1] - times[0])
        step.append(times[2] - times[1])
    total = min(b + s for b, s in zip(backward[1:], step[1:], strict=True))
    return {
        "forward_s": forward_s,
        "update_s": total,
        "first_update_s": backward[0] + step[0],
        "optimizer_s": min(step[1:]),
    }


def deepspeed(work: dict[str, Any]) -> dict[str, float]:
    """The bare loop's forward and backward, its optimizer under DeepSpeed."""
    from raypo.learner.deepspeed_internals import import_deepspeed

    ds = import_deepspeed()
    one_process()
    loop = Bare(work, learning=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": work.get("stage", 2)},
        "bf16": {"enabled": work["dtype"] == "bfloat16"},
        "steps_per_print": None,
    }
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-6, fused=True)
    engine, *_ = ds.initialize(
        model=loop.model, optimizer=optimizer, config=config, dist_init_required=False
    )
    totals, steps = [], []
    for _ in range(work["repeats"] + 1):
        begin = time.perf_counter()
        log_probs = loop.log_probs()
        engine.backward((log_probs - log_probs.detach()).exp().mean().neg())
        middle = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - middle)
        totals.append(time.perf_counter() - begin)
    return {"update_s": min(totals[1:]), "optimizer_s": min(steps[1:])}


def learner(work: dict[str, Any]) -> dict[str, float]:
    """raypo's learner without Ray: a pass of log-probs, and an update."""
    from raypo.collectives import Workers
    from raypo.config import LearnerSection, ModelSection, PPOSection
    from raypo.learner.deepspeed_internals import import_deepspeed
    from raypo.learner.learner import Learner

    import_deepspeed()
    one_process()
    responses = work["prompts"] * work["samples"]
    built = Learner(
        ModelSection(policy=work["model"], dtype=work["dtype"], **work.get("model_section", {})),
        PPOSection.model_validate(
            {"advantage": "grpo", "aggregation": "sequence_mean", "minibatch_size": responses}
            | {"kl": {"coef": 0.0}}
        ),
        LearnerSection(policy_lr=1e-6, **work.get("learner_section", {})),
        temperature=1.0,
        max_new_tokens=work["new_tokens"],
        num_steps=1,
        seed=0,
        workers=Workers(),
    )
    batch = experience(work)
    found = {"forward_s": shortest(work["repeats"], lambda: built.log_probs(batch))}
    step_of = built._policy.step
    updates, steps = [], []

    def timed_step() -> Any:
        begin = time.perf_counter()
        result = step_of()
        steps.append(time.perf_counter() - begin)
        return result

    built._policy.step = timed_step  # type: ignore[method-assign]
    for number in range(work["repeats"] + 1):
        begin = time.perf_counter()
        built.update(batch, step=number + 1)
        updates.append(time.perf_counter() - begin)
    found |= {"update_s": min(updates[1:]), "first_update_s": updates[0]}
    return found | {"optimizer_s": min(steps[1:])}


def experience(work: dict[str, Any]) -> Experience:
    """The work as the learner sees it."""
    prompts, responses = token_ids(work)
    groups, samples, new = responses.shape
    rows = groups * samples
    ones, zeros = torch.ones(rows, new, dtype=torch.bool), torch.zeros(rows, new)
    return Experience(
        prompt_ids=prompts.repeat_interleave(samples, 0),
        prompt_mask=torch.ones(rows, prompts.shape[1], dtype=torch.bool),
        response_ids=responses.flatten(0, 1),
        attention_mask=ones,
        response_mask=ones,
        rollout_log_probs=zeros,
        scores=torch.zeros(rows),
        group_index=torch.arange(groups).repeat_interleave(samples),
        minibatch=torch.zeros(rows, dtype=torch.int64),
        truncated=torch.zeros(rows, dtype=torch.bool),
        weight_version=torch.zeros(rows, dtype=torch.int64),
        advantages=torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 1)))
        .float()
        .expand(rows, new)
        .contiguous(),
        returns=zeros,
    )


def one_process() -> None:
    """A process group of this process alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )


PIECES = {"vllm": vllm, "bare": bare, "deepspeed": deepspeed, "learner": learner}

if __name__ == "__main__":
    work = json.loads(sys.argv[2])
    torch.set_num_threads(work["threads"])
    found = PIECES[sys.argv[1]](work)
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM and DeepSpeed take seconds to come down
