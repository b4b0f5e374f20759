"""Evaluate a policy that learns from examples by answers that engines sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypo.config import PolicyExamplesConfig
from raypo.data.prompts import load_prompts
from raypo.learner.supervised import SupervisedLearner
from raypo.models.loading import Limits, stop_token_ids
from raypo.rewards.functions import evaluation_function
from raypo.rewards.labels import label_checks
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.reward_trial import ROWS, try_before_start
from raypo.run.run import Run
from raypo.run.services import start_deployments
from raypo.serving.client import EngineClient
from raypo.types import Prompt
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import open_transport
from raypo.weight_sync.transport import Transport


@dataclass(frozen=True)
class AnswerEvaluation:
    """Evaluation on held-out prompts: `eval.function` scores the answers that engines sample.

    All workers call every method.
    """

    run: Run[PolicyExamplesConfig]
    prompts: Sequence[Prompt]
    function: RewardFunction | None
    engine: EngineClient
    sampler: Sampler
    transport: Transport

    @classmethod
    def start(cls, run: Run[PolicyExamplesConfig], tokenizer: Any) -> AnswerEvaluation | None:
        """Load the held-out prompts and start the engines. None means that no function scores."""
        config, key = run.config, "eval.prompts"
        if not config.needs_engine:
            return None
        section = config.data.model_copy(update={"prompts": config.eval.prompts})
        loaded = load_prompts(section, tokenizer, key=key, label_checks=label_checks(config, key))
        for note in loaded.notes(key):
            run.tell.message(note)
        Limits.of(config.model.policy).check([[loaded.highest]], tokenizer, key=key)
        function = evaluation_function(config.eval, None)
        if function is not None and run.workers.rank == 0:
            try_before_start(function, loaded.prompts[:ROWS], tokenizer, run.tell.message)
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
        sampler = Sampler(engine, tokenizer, sampling)
        evaluation = cls(run, loaded.prompts, function, engine, sampler, transport)
        if services.in_turn:
            evaluation.wait()
        return evaluation

    def wait(self) -> None:
        """Wait until the engines have started."""
        self.run.tell.phase("waiting for the engine")
        self.engine.wait(self.run.config.placement.timeout_s)

    def evaluate(self, learner: SupervisedLearner[Any], *, version: int) -> dict[str, float]:
        """Push the weights under a version, and return the score of answers sampled with them."""
        config, workers, engine = self.run.config, self.run.workers, self.engine
        self.transport.push(learner.named_weights, engine, version=version, workers=workers)
        probe = Probe.of(self.prompts, config, temperature=1.0)
        metrics = try_probe(learner, engine, probe, version, workers)
        return metrics | evaluate_policy(
            self.prompts, self.sampler, self.function, section=config.eval, workers=workers
        )
