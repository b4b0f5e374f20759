"""Training loop and shared code of the recipes that learn from examples: sft, dpo, reward_model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch

from raypo.config import DPOConfig, RewardModelConfig, SFTConfig
from raypo.data.examples import LoadedExamples
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.prompts import load_prompts
from raypo.data.stream import ShuffledStream
from raypo.learner.export import Export
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.learner.trained_model import in_shares
from raypo.metrics.clock import Clock
from raypo.models.loading import Limits, load_tokenizer, stop_token_ids
from raypo.rewards.functions import evaluation_function
from raypo.rewards.labels import label_checks
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.engines import PolicyEngines
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.reward_trial import ROWS, try_before_start
from raypo.rollout.sharding import balanced_shares
from raypo.run.records import Records
from raypo.run.run import Run, open_run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import start_deployments
from raypo.serving.client import EngineClient
from raypo.types import Prompt
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import open_transport
from raypo.weight_sync.transport import Transport

AnyConfig = TypeVar("AnyConfig", SFTConfig, RewardModelConfig, DPOConfig)
PolicyConfig = TypeVar("PolicyConfig", SFTConfig, DPOConfig)
Reader = Callable[..., LoadedExamples[Item]]
"""A loader such as `load_examples`, called with (section, tokenizer, stop token ids, key=)."""


def examples_loop(setup: dict[str, Any], kind: type[ExamplesRecipe[Any, Any]]) -> dict[str, Any]:
    """Run a recipe on one learner worker. Ray Train calls this on each worker.

    Args:
        setup: `config.model_dump()` of an ExamplesConfig.
        kind: The recipe's class, which loads the data and makes the learning task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed step}`.
    """
    with open_run(setup) as run:
        config = run.config
        recipe = kind(run)
        records = Records(run)
        recipe.start_engine()  # only if `eval.function` scores sampled answers
        run.tell.phase("loading the model")
        learner = new_learner(run, recipe.make_task)
        recipe.before_restoring(learner)
        models = trained_models(config, learner, recipe.tokenizer)
        checkpoints = Checkpoints(run, records, run.workers, models)
        if saved := checkpoints.restore(learner):
            recipe.stream.load_state_dict(saved["stream"])
        recipe.wait_for_engine()
        if records.last_step == 0:
            records.note_initial(recipe.evaluate(learner, version=0))

        for step in records.steps():
            clock = Clock()
            metrics = learner.update(recipe.draw_batch(), step=step)
            clock.lap("time/update_s")
            is_evaluated = config.eval.is_due(step, last_step=config.num_steps)
            if is_evaluated:
                metrics |= recipe.evaluate(learner, version=step)
            clock.lap("time/held_out_s")
            state = {"stream": recipe.stream.state_dict()}
            checkpoint = checkpoints.save_when_due(step, metrics, learner, state=state)
            clock.lap("time/checkpoint_s")
            records.report(step, metrics, clock, checkpoint, to_ray=is_evaluated)

        return records.finish()


class ExamplesRecipe(ABC, Generic[AnyConfig, Item]):
    """The data and the task of a recipe on one worker. All workers call every method."""

    held_out_key: ClassVar[str] = "prompts"
    """Key of the section `eval` that names the held-out examples."""

    def __init__(self, run: Run[AnyConfig]) -> None:
        """Load the examples, and report rows that were left out or are repeated."""
        self.run, config = run, run.config
        self.tokenizer = tokenizer = load_tokenizer(config.model.policy)
        stop, read = stop_token_ids(config.model.policy, tokenizer), self.reader(config)
        loaded, size = read(config.data, tokenizer, stop), config.learner.batch_size
        notes = loaded.notes("data.prompts")
        notes += few_rows_notes(config.data, loaded.sizes, size, key="learner.batch_size")
        self.held_out: Sequence[Item] = []
        if sources := getattr(config.eval, self.held_out_key):
            section = config.data.model_copy(update={"prompts": sources})
            key = f"eval.{self.held_out_key}"
            of_eval = read(section, tokenizer, stop, key=key)
            self.held_out, notes = of_eval.items, notes + of_eval.notes(key)
        limits = Limits.of(config.model.policy)
        limits.check(sequences(loaded.items), tokenizer, key="data.prompts")
        limits.check(sequences(self.held_out), tokenizer, key=f"eval.{self.held_out_key}")
        for note in notes:
            run.tell.message(note)
        mix = mix_of(config.data, loaded.sizes, size)
        self.stream = ShuffledStream(loaded.items, seed=config.seed, mix=mix)

    @classmethod
    @abstractmethod
    def reader(cls, config: AnyConfig) -> Reader[Item]:
        """Return the loader of the recipe's examples."""

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. The caller has seeded torch's random state."""

    def before_restoring(self, learner: SupervisedLearner[Item]) -> None:
        """Compute values that need the model's initial weights. By default there are none."""

    def draw_batch(self) -> list[Item]:
        """Draw the next batch, and return this worker's share. Shares have about equal tokens."""
        batch = [item for _, item in self.stream.take(self.run.config.learner.batch_size)]
        shares = even_shares([lengths(item) for item in batch], self.run.workers.count)
        return [batch[position] for position in shares[self.run.workers.rank]]

    def start_engine(self) -> None:
        """Start the engines that answer held-out prompts. By default there are none."""

    def wait_for_engine(self) -> None:
        """Wait until the engines have started."""

    def evaluate(self, learner: SupervisedLearner[Item], *, version: int) -> dict[str, float]:
        """Return the loss and related metrics on the held-out examples, or {} if there are none.

        Args:
            learner: The learner, which holds the model.
            version: Version of the weights. If there are engines, they must sample with it.
        """
        if not self.held_out:
            return {}
        workers = self.run.workers
        return learner.evaluate(self.held_out[workers.rank :: workers.count])


class PolicyExamplesRecipe(ExamplesRecipe[PolicyConfig, Item]):
    """A recipe that also scores sampled answers to held-out prompts.

    Engines sample the answers, and `eval.function` scores them. Without `eval.prompts` and
    `eval.function` there are no engines.
    """

    def __init__(self, run: Run[PolicyConfig]) -> None:
        """Load the held-out prompts as well."""
        super().__init__(run)
        config = run.config
        self.held_out_prompts: Sequence[Prompt] = []
        self.engine: EngineClient | None = None
        if config.needs_engine:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            key = "eval.prompts"
            checks = label_checks(config, key)
            loaded = load_prompts(section, self.tokenizer, key=key, label_checks=checks)
            for note in loaded.notes(key):
                run.tell.message(note)
            limits = Limits.of(config.model.policy)
            limits.check([[loaded.highest]], self.tokenizer, key=key)
            self.held_out_prompts = loaded.prompts
        self.eval_function = evaluation_function(config.eval, None)
        if self.eval_function is not None and self.held_out_prompts and not run.workers.rank:
            prompts = self.held_out_prompts[:ROWS]
            try_before_start(self.eval_function, prompts, self.tokenizer, run.tell.message)
        self.sampling = Sampling.of(
            config.rollout,
            stop_token_ids=stop_token_ids(config.model.policy, self.tokenizer),
            seed=config.seed,
        )
        self.transport: Transport = open_transport(
            config.rollout.engine,
            colocated=config.placement.group_of("engine") == "colocated",
        )

    def start_engine(self) -> None:
        """Start the engines that answer held-out prompts, if `eval.function` scores the answers."""
        run = self.run
        if run.config.needs_engine:
            run.tell.phase("starting the engine")
            logs = str(run.files.logs_dir)
            services = start_deployments(run.config, run.name, run.workers, logs_dir=logs)
            self.engine = services.engine
            if services.in_turn:
                self.wait_for_engine()

    def wait_for_engine(self) -> None:
        """Wait until the engines, if there are any, have started."""
        if self.engine is not None:
            self.run.tell.phase("waiting for the engine")
            self.engine.wait(self.run.config.placement.timeout_s)

    def evaluate(self, learner: SupervisedLearner[Item], *, version: int) -> dict[str, float]:
        """Return the loss on held-out examples and, with engines, the score of sampled answers."""
        metrics, engine = super().evaluate(learner, version=version), self.engine
        if engine is None:
            return metrics
        config, workers = self.run.config, self.run.workers
        self.transport.push(learner.named_weights, engine, version=version, workers=workers)
        probe = Probe.of(self.held_out_prompts, config, temperature=1.0)
        metrics |= try_probe(learner, engine, probe, version, workers)
        of_answers: dict[str, float] = {}
        if workers.rank == 0:
            sampler = Sampler(PolicyEngines(engine), self.tokenizer, self.sampling)
            of_answers, _ = evaluate_policy(
                self.held_out_prompts, sampler, self.eval_function, section=config.eval
            )
        return metrics | workers.broadcast(of_answers)


def new_learner(run: Run[Any], make_task: Callable[[], Task[Item]]) -> SupervisedLearner[Item]:
    """Seed torch's random state, load the model and return the learner of a run."""
    config, workers = run.config, run.workers
    torch.manual_seed(config.seed)
    shares: Any = nullcontext()
    if not isinstance(config, RewardModelConfig):  # ZeRO-3 shards would have no float32 head
        shares = in_shares(config.learner, dtype=config.model.dtype, workers=workers)
    with shares:
        task = make_task()
    return SupervisedLearner(
        task,
        config.learner,
        dtype=config.model.dtype,
        num_steps=config.num_steps,
        workers=workers,
    )


def sequences(items: Iterable[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield prompt and response of every sequence that a forward pass reads for the items."""
    for item in items:
        for name in ("response_ids", "chosen_ids", "rejected_ids", "other_ids"):
            if (response := getattr(item, name, None)) is not None:
                yield item.prompt_ids, response


def lengths(item: Any) -> tuple[int, int]:
    """Return an item's number of prompt tokens, and its number of other tokens."""
    return len(item.prompt_ids), item.num_tokens - len(item.prompt_ids)


def even_shares(sizes: Sequence[tuple[int, int]], num_shares: int) -> list[list[int]]:
    """Split a batch over workers so that each trains on about the same number of tokens.

    Args:
        sizes: The `lengths` of each item.
        num_shares: Number of workers.

    Returns:
        The indices of each worker's items.
    """
    prompts, others = ([size[which] for size in sizes] for which in (0, 1))
    return balanced_shares([[each] for each in range(len(sizes))], prompts, others, num_shares)


def trained_models(
    config: Any, learner: SupervisedLearner[Any], tokenizer: Any
) -> dict[str, Export]:
    """Return the exports of the trained model and, with LoRA, of the adapter by itself."""
    exports, model = {learner.name: learner.model_export(tokenizer)}, config.model
    if model.lora:
        exports["adapter"] = learner.adapter_export(model.lora, model.policy)
    return exports
