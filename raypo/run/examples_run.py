"""Training loop and shared code of the recipes that learn from examples: sft, dpo, reward_model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import DPOConfig, RewardModelConfig, SFTConfig
from raypo.data.examples import LoadedExamples
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.prompts import load_prompts
from raypo.data.stream import ShuffledStream
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.learner.trained_model import in_shares
from raypo.metrics.clock import Clock
from raypo.models.loading import Limits, load_tokenizer, stop_token_ids
from raypo.rewards.functions import evaluation_function
from raypo.rewards.labels import label_checks
from raypo.rollout.collect import Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.sharding import balanced_shares
from raypo.run.run import Run, open_run
from raypo.run.services import start_deployments
from raypo.run.setup import Runtime
from raypo.serving.client import EngineClient
from raypo.storage.run_files import RunFiles
from raypo.types import Prompt
from raypo.weight_sync.probe import Probe
from raypo.weight_sync.push import open_transport, push_weights
from raypo.weight_sync.transport import Transport

AnyConfig = TypeVar("AnyConfig", SFTConfig, RewardModelConfig, DPOConfig)
PolicyConfig = TypeVar("PolicyConfig", SFTConfig, DPOConfig)
Reader = Callable[..., LoadedExamples[Item]]
"""A loader such as `load_examples`, called with (section, tokenizer, stop token ids, key=)."""


def examples_loop(setup: dict[str, Any], kind: type[ExamplesRun[Any, Any]]) -> dict[str, Any]:
    """Run a recipe on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of an ExamplesConfig.
        kind: The recipe's class, which loads the data and makes the learning task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed step}`.
    """
    with open_run(setup, kind) as run:
        engine = run.start_engine()  # only if `eval.function` scores sampled answers
        learner = run.start_learner()
        run.evaluate_before_first_update(learner, engine)

        for step in run.steps():
            clock = Clock()
            metrics = learner.update(run.draw_batch(), step=step)
            clock.lap("time/update_s")
            is_evaluated = run.config.eval.is_due(step, last_step=run.config.num_steps)
            if is_evaluated:
                metrics |= run.evaluate(learner, engine, version=step)
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint, to_ray=is_evaluated)

        return run.finish()


@dataclass
class ExamplesRun(Run[AnyConfig], Generic[AnyConfig, Item]):
    """One worker's view of a run that learns from examples; all workers call every method."""

    tokenizer: Any
    stream: ShuffledStream[Item]
    held_out: Sequence[Item]

    held_out_key: ClassVar[str] = "prompts"
    """Key of the section `eval` that names the held-out examples."""

    @classmethod
    @abstractmethod
    def reader(cls, config: AnyConfig) -> Reader[Item]:
        """Return the loader of the recipe's examples."""

    @classmethod
    def prepare(
        cls,
        config: AnyConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """Load the examples, and report rows that were left out or repeat."""
        tokenizer = load_tokenizer(config.model.policy)
        stop, read = stop_token_ids(config.model.policy, tokenizer), cls.reader(config)
        loaded, size = read(config.data, tokenizer, stop), config.learner.batch_size
        notes = loaded.notes("data.prompts")
        notes += few_rows_notes(config.data, loaded.sizes, size, key="learner.batch_size")
        held_out: Sequence[Item] = []
        if sources := getattr(config.eval, cls.held_out_key):
            section = config.data.model_copy(update={"prompts": sources})
            key = f"eval.{cls.held_out_key}"
            of_eval = read(section, tokenizer, stop, key=key)
            held_out, notes = of_eval.items, notes + of_eval.notes(key)
        limits = Limits.of(config.model.policy)
        limits.check(sequences(loaded.items), tokenizer, key="data.prompts")
        limits.check(sequences(held_out), tokenizer, key=f"eval.{cls.held_out_key}")
        for note in notes:
            tell.message(note)
        mix = mix_of(config.data, loaded.sizes, size)
        stream = ShuffledStream(loaded.items, seed=config.seed, mix=mix)
        return cls(config, runtime, workers, files, tell, tokenizer, stream, held_out)

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. Torch's random state is seeded before."""

    def start_learner(self) -> SupervisedLearner[Item]:
        """Return the model under DeepSpeed, restored from the last checkpoint if there is one."""
        self.tell.phase("loading the model")
        learner = new_learner(self, self.make_task)
        self.before_restoring(learner)
        self.restore(learner)
        return learner

    def before_restoring(self, learner: SupervisedLearner[Item]) -> None:
        """Compute what needs the model's initial weights. By default nothing."""

    def draw_batch(self) -> list[Item]:
        """Draw the next batch, and return this worker's share; shares have about equal tokens."""
        batch = [item for _, item in self.stream.take(self.config.learner.batch_size)]
        shares = even_shares([lengths(item) for item in batch], self.workers.count)
        return [batch[position] for position in shares[self.workers.rank]]

    def start_engine(self) -> EngineClient | None:
        """Start the engines that answer held-out prompts. None if no function scores answers."""
        return None

    def evaluate_before_first_update(
        self, learner: SupervisedLearner[Item], engine: EngineClient | None
    ) -> None:
        """Evaluate the initial model; the values are reported with the first step."""
        if engine is not None:
            self.tell.phase("waiting for the engine")
            engine.wait(self.config.placement.timeout_s)
        if self.last_step == 0:
            self.note_initial(self.evaluate(learner, engine, version=0))

    def evaluate(
        self, learner: SupervisedLearner[Item], engine: EngineClient | None, *, version: int
    ) -> dict[str, float]:
        """Return the loss and related metrics on the held-out examples; empty if there are none.

        Args:
            learner: The model.
            engine: Engines that answer held-out prompts, if the recipe uses any.
            version: Weight version that the engines must answer with.
        """
        if not self.held_out:
            return {}
        return learner.evaluate(self.held_out[self.workers.rank :: self.workers.count])

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor."""
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])

    def save_models(self, learner: SupervisedLearner[Item]) -> None:
        """Write the model to the run's `policy/` or `reward_model/`, its adapter to `adapter/`."""
        save_trained(self, learner, self.tokenizer)


@dataclass
class PolicyExamplesRun(ExamplesRun[PolicyConfig, Item]):
    """One worker's view of a run that also scores sampled answers to held-out prompts.

    Engines sample the answers, and `eval.function` scores them. Without `eval.prompts` and
    `eval.function` there are no engines.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        self.held_out_prompts: Sequence[Prompt] = []
        if config.needs_engine:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            key = "eval.prompts"
            checks = label_checks(config, key)
            loaded = load_prompts(section, self.tokenizer, key=key, label_checks=checks)
            for note in loaded.notes(key):
                self.tell.message(note)
            limits = Limits.of(config.model.policy)
            limits.check([[loaded.highest]], self.tokenizer, key=key)
            self.held_out_prompts = loaded.prompts
        self.eval_function = evaluation_function(config.eval, None)
        self.sampling = Sampling.of(
            config.rollout,
            stop_token_ids=stop_token_ids(config.model.policy, self.tokenizer),
            seed=config.seed,
        )
        self.transport: Transport = open_transport(
            config.rollout.engine,
            colocated=config.placement.group_of("engine") == "colocated",
        )

    def start_engine(self) -> EngineClient | None:
        """Start the engines that answer held-out prompts. None if no function scores answers."""
        if not self.config.needs_engine:
            return None
        self.tell.phase("starting the engine")
        services = start_deployments(
            self.config, self.name, self.workers, logs_dir=str(self.files.logs_dir)
        )
        return services.engine

    def evaluate(
        self, learner: SupervisedLearner[Item], engine: EngineClient | None, *, version: int
    ) -> dict[str, float]:
        """Return the loss on held-out examples and, with engines, the score of sampled answers."""
        metrics = super().evaluate(learner, engine, version=version)
        if engine is None:
            return metrics
        config = self.config
        probe = Probe.of(self.held_out_prompts, config, temperature=1.0)
        metrics |= push_weights(
            learner,
            engine,
            version=version,
            transport=self.transport,
            probe=probe,
            workers=self.workers,
        )
        return metrics | evaluate_policy(
            self.held_out_prompts,
            engine,
            self.tokenizer,
            self.eval_function,
            section=config.eval,
            sampling=self.sampling,
            workers=self.workers,
        )


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
    """Return the number of prompt tokens of an item, and of all its other tokens."""
    return len(item.prompt_ids), item.num_tokens - len(item.prompt_ids)


def even_shares(sizes: Sequence[tuple[int, int]], num_shares: int) -> list[list[int]]:
    """Split a batch over workers so that each trains about as many tokens.

    Args:
        sizes: The `lengths` of each item.
        num_shares: Number of workers.

    Returns:
        The indices of each worker's items.
    """
    prompts, others = ([size[which] for size in sizes] for which in (0, 1))
    return balanced_shares([[each] for each in range(len(sizes))], prompts, others, num_shares)


def save_trained(run: Run[Any], learner: SupervisedLearner[Any], tokenizer: Any) -> None:
    """Write the trained model into the run's folder and, with LoRA, the adapter by itself."""
    run.replace_folder(
        run.files.folder / learner.name, lambda folder: learner.save_model(folder, tokenizer)
    )
    model = run.config.model
    if model.lora:
        run.replace_folder(
            run.files.adapter_dir,
            lambda folder: learner.save_adapter(folder, model.lora, model.policy),
        )
