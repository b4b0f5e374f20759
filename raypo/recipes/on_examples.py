"""Shared part of the recipes that learn from examples: sft, dpo and reward_model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic

import numpy as np

from raypo.config import ExamplesConfig, PolicyExamplesConfig
from raypo.data.examples import LoadedExamples
from raypo.data.images import without_images
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.stream import ShuffledStream
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item
from raypo.metrics.clock import Clock
from raypo.models.loading import Limits, load_tokenizer, stop_token_ids
from raypo.rewards.functions import evaluation_function
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.engines import PolicyEngines
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.image_reader import image_reader
from raypo.rollout.reward_trial import ROWS, try_before_start
from raypo.run.online_inputs import load_held_out
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import start_deployments
from raypo.run.steps import StepResult, run_steps
from raypo.run.supervised_learner import even_shares, lengths, trained_models
from raypo.serving.client import EngineClient
from raypo.types import Prompt
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import open_transport
from raypo.weight_sync.transport import Transport


@dataclass
class Examples(Generic[Item]):
    """Examples of a run, the same on all workers."""

    tokenizer: Any
    stream: ShuffledStream[Item]
    held_out: Sequence[Item]

    @classmethod
    def load(
        cls,
        run: Run[Any],
        load_kind: Callable[..., LoadedExamples[Item]],
        *,
        section: Any = None,
        held_out_key: str = "prompts",
    ) -> Examples[Item]:
        """Load the examples, and report skipped and repeated rows.

        Args:
            run: The run.
            load_kind: Loader of the recipe's kind of examples, such as `load_examples`.
            section: Replacement for the config section `data`. None means the config's own section.
            held_out_key: Key of the section `eval` that names the held-out examples.
        """
        config, section = run.config, section or run.config.data
        tokenizer = load_tokenizer(config.model.policy)
        stop_ids = stop_token_ids(config.model.policy, tokenizer)
        if section.image_key is not None:
            reader = cache(partial(image_reader, config.model.policy))
            load_kind = partial(load_kind, reader=reader)
        examples, batch_size = load_kind(section, tokenizer, stop_ids), config.learner.batch_size
        notes = examples.notes("data.prompts")
        notes += few_rows_notes(section, examples.sizes, batch_size, key="learner.batch_size")
        held_out: Sequence[Item] = []
        key = f"eval.{held_out_key}"
        if sources := getattr(config.eval, held_out_key):
            held_out_examples = load_kind(
                section.model_copy(update={"prompts": sources}), tokenizer, stop_ids, key=key
            )
            held_out, notes = held_out_examples.items, notes + held_out_examples.notes(key)
        limits = Limits.of(config.model.policy)
        limits.check(sequences(without_images(examples.items)), tokenizer, key="data.prompts")
        limits.check(sequences(without_images(held_out)), tokenizer, key=key)
        for note in notes:
            run.tell.message(note)
        mix = mix_of(section, examples.sizes, batch_size)
        stream = ShuffledStream(examples.items, seed=config.seed, mix=mix)
        return cls(tokenizer, stream, held_out)


@dataclass(frozen=True)
class ResponseEvaluation:
    """Evaluation on held-out prompts: `eval.function` scores responses that engines sample.

    All workers call every method.
    """

    run: Run[PolicyExamplesConfig]
    prompts: Sequence[Prompt]
    function: RewardFunction | None
    engine: EngineClient
    sampler: Sampler
    transport: Transport

    @classmethod
    def start(cls, run: Run[PolicyExamplesConfig], tokenizer: Any) -> ResponseEvaluation | None:
        """Load the held-out prompts and start the engines. None means that none are needed."""
        config = run.config
        if not config.needs_engine:
            return None
        held_out = load_held_out(run, tokenizer)
        function = evaluation_function(config.eval, None)
        if function is not None and run.workers.rank == 0:
            try_before_start(function, held_out.prompts[:ROWS], tokenizer, run.tell.message)
        run.tell.phase("starting the engine")
        services = start_deployments(
            config, run.name, run.workers, logs_dir=str(run.files.logs_dir)
        )
        sampling = Sampling.of(
            config.rollout,
            stop_token_ids=stop_token_ids(config.model.policy, tokenizer),
            seed=config.seed,
        )
        transport = open_transport(
            config.rollout.engine, colocated=config.placement.group_of("engine") == "colocated"
        )
        engine = services.engine
        sampler = Sampler(PolicyEngines(engine), tokenizer, sampling)
        evaluation = cls(run, held_out.prompts, function, engine, sampler, transport)
        if services.starts_sequentially:
            evaluation.wait()
        return evaluation

    def wait(self) -> None:
        """Wait until the engines have started."""
        self.run.tell.phase("waiting for the engine")
        self.engine.wait(self.run.config.placement.timeout_s)

    def evaluate(self, learner: SupervisedLearner[Any], *, version: int) -> dict[str, float]:
        """Push the weights under a version, and return metrics of responses sampled with them."""
        config, workers, engine = self.run.config, self.run.workers, self.engine
        self.transport.push(learner.named_weights, engine, version=version, workers=workers)
        probe = Probe.of(self.prompts, config, temperature=1.0)
        metrics = try_probe(learner, engine, probe, version, workers)
        scores: dict[str, float] = {}
        if workers.rank == 0:
            scores, _ = evaluate_policy(
                self.prompts, self.sampler, self.function, section=config.eval
            )
        return metrics | workers.broadcast(scores)


def train_on_examples(
    run: Run[ExamplesConfig],
    records: Records,
    examples: Examples[Item],
    learner: SupervisedLearner[Item],
    response_evaluation: ResponseEvaluation | None = None,
) -> dict[str, Any]:
    """Restore the run and train to its end. All workers call this.

    Args:
        run: The run.
        records: The run's records.
        examples: Examples to learn from.
        learner: The learner, which holds the model and its task.
        response_evaluation: Evaluation of sampled responses. None means that only the loss is
            evaluated.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed step}`.
    """
    config, workers = run.config, run.workers
    models = trained_models(config, learner, examples.tokenizer)
    checkpoints = Checkpoints(run, records, learner, workers, models)
    if state := checkpoints.restore():
        examples.stream.load_state_dict(state["stream"])
    if response_evaluation:
        response_evaluation.wait()

    def train_step(step: int, clock: Clock) -> StepResult:
        batch = [item for _, item in examples.stream.take(config.learner.batch_size)]
        shares = even_shares([lengths(item) for item in batch], learner.data.count)
        metrics = learner.update([batch[index] for index in shares[learner.data.rank]], step=step)
        clock.lap("time/update_s")
        return StepResult(metrics, {"stream": examples.stream.state_dict()})

    def evaluate(step: int) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if examples.held_out:
            data = learner.data
            metrics = learner.evaluate(examples.held_out[data.rank :: data.count])
        return metrics | (
            response_evaluation.evaluate(learner, version=step) if response_evaluation else {}
        )

    if records.last_step == 0:
        records.note_initial(evaluate(0))
    run_steps(run, records, checkpoints, train_step, evaluate)
    return records.finish()


def sequences(items: Iterable[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the prompt and response of every sequence in the items' forward passes."""
    for item in items:
        for name in ("response_ids", "chosen_ids", "rejected_ids", "other_ids"):
            if (response := getattr(item, name, None)) is not None:
                yield item.prompt_ids, response
