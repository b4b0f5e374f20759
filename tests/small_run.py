"""PPO runs of seconds, in one process: raypo's prompts, sampling, scoring, updates and files.

Ray, vLLM and DeepSpeed are left out: the engine is a copy of the policy in plain torch, which gets
its weights in a push, and the learner's models are `PlainModel`s. The policy adds digits, which it
half learned from texts of a chat template.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.data.prompts import load_prompts
from raypo.data.stream import ShuffledStream
from raypo.learner import learner as learner_module
from raypo.learner.learner import Learner
from raypo.metrics.clock import Clock
from raypo.metrics.process_memory import peak_memory
from raypo.ppo.controllers import UpdateState
from raypo.recipes.ppo import ppo_step
from raypo.rollout.batch_scoring import Scorer, Scoring
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.prompt_source import PromptSource
from raypo.rollout.sharding import deal, to_experience
from raypo.rollout.step_batch import StepBatch
from raypo.run.rollout_metrics import batch_metrics, rollout_rows, speed_metrics
from raypo.run.text_metrics import TextMetrics
from raypo.serving.requests import Completion, SamplingRequest
from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles
from raypo.types import Rollout
from tests import stand_ins
from tests.tiny import TOKENS, tiny_policy
from tests.unit.learner.plain import PlainModel

END = TOKENS["eos_token_id"]
SUMS = [(a, b) for a in range(10) for b in range(10)]
Rows = list[dict[str, Any]]


def half_taught_policy(folder: Path, *, num_steps: int = 200) -> Path:
    """Save a policy that learned the sums of digits for a while, as texts of its chat template."""
    tiny_policy(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"user: {a}+{b}=\nassistant: {a + b}" for a, b in SUMS]
    rows = [[*tokenizer(text)["input_ids"], END] for text in texts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(num_steps):
        logits = model(ids).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def chat(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{a}+{b}="}]


def sums(numbers: Sequence[tuple[int, int]]) -> Rows:
    return [{"prompt": chat(a, b), "label": str(a + b)} for a, b in numbers]


def right(rollouts: list[Rollout]) -> list[float]:
    return [float(rollout.response == rollout.label) for rollout in rollouts]


class AdamModel(PlainModel):
    """A model in float32 under AdamW, whose value head starts at 0 as it does in a run."""

    optimizer: ClassVar[Any] = partial(torch.optim.AdamW, weight_decay=0.0)
    dtype = torch.float32

    def __init__(self, module: Any, **options: Any) -> None:
        super().__init__(module, **options)
        if hasattr(module, "value_head"):
            module.value_head.weight.data.zero_()

    def step(self) -> tuple[bool, float]:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        done = super().step()
        self.gradients.clear()
        return done

    def named_weights(self, network: Any) -> Any:
        return network.named_parameters()


@contextmanager
def plain_learner():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with patch.object(learner_module, "TrainedModel", AdamModel):
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


@dataclass
class TorchEngine:
    """Samples with a copy of the policy."""

    model: Any
    version: int = 0
    same_seeds: bool = False
    """True to sample the same response for all samples of a prompt."""

    def push(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.model.load_state_dict(dict(weights), strict=False)
        self.version = version

    @torch.no_grad()
    def answers(self, requests: list[SamplingRequest]) -> list[Completion]:
        width = max(len(request.prompt_ids) for request in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt_ids) :] = torch.from_numpy(request.prompt_ids)
        mask = (
            torch.arange(width) >= torch.tensor([[width - len(r.prompt_ids)] for r in requests])
        ).long()
        first, generator = requests[0], torch.Generator().manual_seed(requests[0].seed or 0)
        tokens, gaps, running = [], [], torch.ones(len(requests), dtype=torch.bool)
        for _ in range(first.max_new_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self.model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            log_probs = torch.log_softmax(logits.float() / first.temperature, -1)
            token = torch.multinomial(log_probs.exp(), 1, generator=generator)
            if self.same_seeds:
                token = log_probs.argmax(-1, keepdim=True)
            tokens.append(torch.where(running, token[:, 0], -1))
            gaps.append(log_probs.gather(1, token)[:, 0])
            running = running & ~torch.isin(token[:, 0], torch.tensor(first.stop_token_ids))
            ids, mask = torch.cat([ids, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
            if not running.any():
                break
        sampled, of_tokens = torch.stack(tokens, 1), torch.stack(gaps, 1).numpy()
        completions = []
        for row, own in enumerate(sampled):
            count = int((own >= 0).sum())
            reason = "length" if running[row] else "stop"
            own_ids = own[:count].numpy().astype(np.int32)
            completions.append(Completion(own_ids, of_tokens[row, :count], reason, self.version))
        return completions


Push = Callable[[TorchEngine, Mapping[str, torch.Tensor], int], None]


def run_small(  # noqa: PLR0915
    folder: Path,
    policy: Path,
    name: str,
    *,
    num_steps: int = 25,
    rows: Rows | None = None,
    held_out: Rows | None = None,
    reward: Callable[[list[Rollout]], list[float]] = right,
    judge: Callable[[list[Rollout]], list[float]] = right,
    push: Push = TorchEngine.push,
    stops: tuple[int, ...] = (END,),
    same_seeds: bool = False,
    **sections: Any,
) -> RunFiles:
    """Run PPO and write its config, metrics and rollouts. Return its files.

    Args:
        folder: Folder of runs.
        policy: The policy, as `half_taught_policy` makes it.
        name: Name of the run.
        num_steps: Number of steps.
        rows: Training prompts. None means two thirds of the sums.
        held_out: Held-out prompts. None means the other sums.
        reward: Reward function.
        judge: Function that scores the held-out responses.
        push: Function that pushes weights to the engine.
        stops: Tokens that end a response.
        same_seeds: True to sample the likeliest response only.
        sections: Sections of the config, over those of this function.
    """
    mixed = np.random.default_rng(0).permutation(len(SUMS))
    files = RunFiles(str(folder), name)
    for kind, given, part in (("train", rows, mixed[:66]), ("held_out", held_out, mixed[66:])):
        lines = sums([SUMS[index] for index in part]) if given is None else given
        path = folder / f"{name}-{kind}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {
        "name": name,
        "num_steps": num_steps,
        "storage_path": str(folder),
        "model": {"policy": str(policy), "dtype": "float32"},
        "data": {"prompts": str(folder / f"{name}-train.jsonl"), "label_key": "label"},
        "reward": {"function": "tests.small_run:right"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 6},
        "ppo": {"minibatch_size": 16},
        "learner": {"policy_lr": 3e-4, "critic_lr": 3e-3, "max_tokens_per_microbatch": 10_000},
        "eval": {"prompts": str(folder / f"{name}-held_out.jsonl"), "every": 5},
    }
    for section, keys in sections.items():
        values[section] = values.get(section, {}) | keys if isinstance(keys, dict) else keys
    config = PPOConfig.model_validate(values)
    files.write_config(config.model_dump(mode="json"))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    loaded = load_prompts(config.data, tokenizer)
    held = load_prompts(
        config.data.model_copy(update={"prompts": config.eval.prompts}),
        tokenizer,
        key="eval.prompts",
    )
    texts = TextMetrics.of(loaded, held, tokenizer)
    source = PromptSource(
        ShuffledStream(loaded.prompts, seed=config.seed), config.rollout.samples_per_prompt
    )
    read = partial(AutoModelForCausalLM.from_pretrained, policy, dtype=torch.float32)
    engine, reference = TorchEngine(read().eval(), same_seeds=same_seeds), read().eval()
    sampling = Sampling.of(
        config.rollout,
        stop_token_ids=stops,
        seed=config.seed,
        samples_per_prompt=config.rollout.samples_per_prompt,
    )
    sampler = Sampler(stand_ins.Engine(engine.answers), tokenizer, sampling)
    of_reference = partial(_log_probs, reference, temperature=config.rollout.temperature)
    scorer = Scorer(
        reward,
        (),
        {"function": 1.0},
        reference=stand_ins.Reference(of_reference) if config.ppo.needs_reference else None,
    )
    evaluate = partial(
        evaluate_policy, held.prompts, sampler, judge, section=config.eval, scorer=scorer
    )
    run: Any = SimpleNamespace(config=config, tell=SimpleNamespace(message=lambda text: None))
    workers, state = Workers(), UpdateState.initial(config.ppo)
    with plain_learner():
        learner = Learner(
            config.model,
            config.ppo,
            config.learner,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            num_steps=num_steps,
            seed=config.seed,
            workers=workers,
        )
        push(engine, dict(learner.named_weights()), 0)
        initial, _ = evaluate()
        for step in range(1, num_steps + 1):
            began, clock = time.perf_counter(), Clock()
            batch = StepBatch(
                missing_groups=config.rollout.prompts_per_step,
                filter=config.ppo.filter,
                reward=config.reward,
            )
            while batch.num_wanted:
                rollouts = sampler.sample(source.draw(batch.num_wanted))
                clock.lap("time/generate_s")
                batch.add(Scoring(scorer).results(rollouts))
                clock.lap("time/score_s")
            (dealt,) = deal(
                batch.trained,
                minibatch_size=config.ppo.minibatch_size,
                seed=(config.seed, step),
                num_workers=1,
            )
            experience, metrics, state = ppo_step(
                learner,
                to_experience(dealt, parts=config.ppo.part_names),
                config.ppo,
                state,
                workers,
                max_new_tokens=config.rollout.max_new_tokens,
                step=step,
                clock=clock,
            )
            counts = source.counts(batch)
            metrics |= batch_metrics(run, batch, counts, sampling, step=step)
            metrics |= texts.metrics(batch.scored, step=step)
            files.write_rollouts(step, rollout_table(rollout_rows(dealt, experience)))
            clock.lap("time/save_rollouts_s")
            push(engine, dict(learner.named_weights()), step)
            clock.lap("time/push_weights_s")
            if step == 1:
                metrics |= {n.replace("/", "/initial_"): value for n, value in initial.items()}
            if config.eval.is_due(step, last_step=num_steps):
                metrics |= evaluate()[0]
            clock.lap("time/held_out_s")
            metrics |= {f"perf/{kind}_learner_gb": gb for kind, gb in peak_memory().items()}
            metrics |= clock.laps
            metrics |= speed_metrics(metrics, time.perf_counter() - began)
            files.append_metrics(step, metrics)
    return files


@torch.no_grad()
def _log_probs(model: Any, rollouts: list[Rollout], *, temperature: float) -> list[np.ndarray]:
    """Log-probs of the responses under a model."""
    rows = [np.concatenate([rollout.prompt_ids, rollout.response_ids]) for rollout in rollouts]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.from_numpy(row)  # what follows a row does not change it
    logits = model(ids).logits[:, :-1].float() / temperature
    all_log_probs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    return [
        log_probs[len(rollout.prompt_ids) - 1 : len(row) - 1]
        for log_probs, rollout, row in zip(all_log_probs, rollouts, rows, strict=True)
    ]
