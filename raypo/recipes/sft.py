"""Supervised fine-tuning: a policy learns the responses of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers
from raypo.config import SFTConfig
from raypo.data.examples import load_examples
from raypo.data.prompts import load_prompts
from raypo.data.stream import ShuffledStream
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import ResponseTask
from raypo.metrics.clock import Clock
from raypo.models.loading import load_causal_lm, load_tokenizer, stop_token_ids
from raypo.models.lora import add_adapter
from raypo.rewards.loader import load_function
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.collect import Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.run.examples_run import ExamplesRun, tell_skipped
from raypo.run.handles import EngineHandle
from raypo.run.run import open_run
from raypo.run.services import start_engines
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from raypo.types import Example, Prompt
from raypo.weight_sync.push import Probe, open_transport, push_weights
from raypo.weights.transport import Transport

NUM_PROBES = 2


def sft_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """A whole supervised fine-tuning run on one learner worker; `ray.train` calls it on each.

    Args:
        setup: `config.model_dump()` of an SFTConfig.

    Returns:
        `{"status": "finished" | "interrupted", "step": the last step that is done}`.
    """
    with open_run(setup, SFTRun) as run:
        engine = run.start_engine()  # where `eval.function` judges sampled answers
        learner = run.start_learner()
        run.evaluate_before_first_update(learner, engine)

        for step in run.steps():
            clock = Clock()
            metrics = learner.update(run.draw_batch(), step=step)
            clock.lap("time/update_s")
            is_evaluated = run.is_evaluation_due(step)
            if is_evaluated:
                metrics |= run.evaluate(learner, engine, version=step)
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint, to_ray=is_evaluated)

        return run.finish()


@dataclass
class SFTRun(ExamplesRun[SFTConfig, Example]):
    """One worker's view of a supervised fine-tuning run."""

    held_out_prompts: list[Prompt]
    eval_function: RewardFunction | None
    sampling: Sampling
    transport: Transport

    @classmethod
    def prepare(
        cls,
        config: SFTConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its examples read and its function loaded."""
        tokenizer = load_tokenizer(config.model.policy)
        stop_ids = stop_token_ids(config.model.policy, tokenizer)
        loaded = load_examples(config.data, tokenizer, stop_ids[0])
        tell_skipped(loaded, tell)
        held_out: list[Example] = []
        prompts: list[Prompt] = []
        if config.eval.prompts:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            held_out = load_examples(section, tokenizer, stop_ids[0], key="eval.prompts").items
            prompts = load_prompts(section, tokenizer, key="eval.prompts").prompts
        function = config.eval.function
        return cls(
            config,
            runtime,
            workers,
            files,
            tell,
            tokenizer=tokenizer,
            stream=ShuffledStream(loaded.items, seed=config.seed),
            held_out=held_out,
            held_out_prompts=prompts,
            eval_function=load_function(function, key="eval.function") if function else None,
            sampling=Sampling.of(config.rollout, stop_token_ids=stop_ids, seed=config.seed),
            transport=open_transport(
                config.rollout.engine, colocated=config.placement.mode == "colocated"
            ),
        )

    def make_task(self) -> ResponseTask:
        """The causal language model."""
        section = self.config.model
        model = load_causal_lm(section.policy, dtype=section.dtype, attention=section.attention)
        return ResponseTask(add_adapter(model, section.lora))

    def start_engine(self) -> EngineHandle | None:
        """The engines that answer held-out prompts; None where nobody judges the answers."""
        if not (self.held_out_prompts and self.eval_function):
            return None
        self.tell.phase("starting the engine")
        return start_engines(
            self.config, self.name, self.workers, logs_dir=str(self.files.logs_dir)
        )

    def evaluate_before_first_update(
        self, learner: SupervisedLearner[Example], engine: EngineHandle | None
    ) -> None:
        """What the run starts from; it stands in the first step's metrics."""
        if engine is not None:
            self.tell.phase("waiting for the engine")
            engine.wait(self.config.placement.timeout_s)
        if self.last_step == 0:
            self.note_initial(self.evaluate(learner, engine, version=0))

    def evaluate(
        self,
        learner: SupervisedLearner[Example],
        engine: EngineHandle | None,
        *,
        version: int,
    ) -> dict[str, float]:
        """Loss on the held-out examples and, with an engine, the score of sampled answers."""
        figures = self.evaluate_held_out(learner)
        if engine is None:
            return figures
        config = self.config
        probe = Probe(
            prompts=[prompt.token_ids for prompt in self.held_out_prompts[:NUM_PROBES]],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=1.0,
            dtype=config.model.dtype,
            seed=config.seed,
        )
        figures |= push_weights(
            learner,
            engine,
            version=version,
            transport=self.transport,
            probe=probe,
            workers=self.workers,
        )
        return figures | evaluate_policy(
            self.held_out_prompts,
            engine,
            self.tokenizer,
            self.eval_function,
            section=config.eval,
            sampling=self.sampling,
            workers=self.workers,
        )
