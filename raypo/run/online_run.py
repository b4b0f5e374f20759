"""The part of a run that all online recipes share: sampling, scoring, weight sync, evaluation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch

from raypo.cluster.actors import DeploymentError, survivors
from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers, as_tensor
from raypo.config import OnlineConfig, functions_of
from raypo.custom.loader import load_function
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.prompts import load_prompts
from raypo.data.stream import ShuffledStream
from raypo.learner.roles import Roles
from raypo.metrics.clock import Span
from raypo.metrics.process_memory import peak_memory
from raypo.models.loading import Limits, load_tokenizer, stop_token_ids
from raypo.pending import Pending
from raypo.plan.estimate import Models
from raypo.rewards.functions import (
    close_function,
    evaluation_function,
    open_function,
    open_remote,
)
from raypo.rewards.labels import label_checks
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.async_rollouts import AsyncRollouts, SyncRollouts
from raypo.rollout.batch_scoring import RewardSources, Scoring
from raypo.rollout.collect import Sampling
from raypo.rollout.dispatch import Dispatch, PushAgain, dispatch, dispatch_shared
from raypo.rollout.episodes import open_episodes
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.in_flight import EnginesInFlight, Pushes
from raypo.rollout.sample_counts import SampleCounts
from raypo.run.engines_load import EnginesLoad
from raypo.run.phases import OffloadingLearner, Phase, Phases
from raypo.run.rollout_metrics import sample_row
from raypo.run.run import Run, Saveable, log_path
from raypo.run.services import Services, start_deployments
from raypo.run.setup import Runtime
from raypo.run.utilization import models_of
from raypo.serving.client import EngineClient, Engines
from raypo.storage.rollout_table import merged, rollout_table
from raypo.storage.run_files import RunFiles
from raypo.tracking.trace import note_call
from raypo.types import Prompt, ScoredRollout
from raypo.weight_sync.push import Probe, PushedLearner, open_transport, push_adapter, push_weights
from raypo.weight_sync.transport import Transport

AnyOnline = TypeVar("AnyOnline", bound=OnlineConfig)


class OnlineLearner(PushedLearner, OffloadingLearner, Saveable, Protocol):
    """What an online run asks of its learner, besides updates."""


@dataclass
class OnlineRun(Run[AnyOnline]):
    """One worker's view of a run that trains on what engines sample; all call every method."""

    tokenizer: Any
    prompts: Sequence[Prompt]
    stream: ShuffledStream[Prompt]
    held_out: Sequence[Prompt]
    reward_function: RewardFunction | None
    reward_servers: RewardFunction | None
    eval_function: RewardFunction | None
    sampling: Sampling
    transport: Transport
    models: Models | None
    """Their shapes, for the arithmetic that they need; None where they are not known."""
    rollouts: SyncRollouts | AsyncRollouts
    """Where those of the steps come from."""
    attempt: str
    """Which attempt of the run this is; engines may outlive one."""
    push_again: PushAgain | None = None
    """The last push once more, for the case that no engine is left that has it; where rollouts are
    collected while the learner updates it is None, for its weights are then of no version."""
    pushes: Pushes | None = None
    """Where requests stay under way while weights are pushed: who asks anew waits for their end."""
    roles: Roles = field(init=False)
    """Who trains policy and critic."""
    _engines_load: EnginesLoad = field(default_factory=EnginesLoad)
    _has_pushed: bool = False
    _memory_asked: Mapping[str, Sequence[Pending[dict[str, float]]]] = field(default_factory=dict)
    _phases: Phases | None = None
    _elsewhere: frozenset[str] = frozenset()
    """Roles that do not live beside these workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.roles = Roles.shared(self.workers)

    @classmethod
    def prepare(
        cls,
        config: AnyOnline,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its prompts read and its functions loaded."""
        for key, path in config.own_functions.items():
            load_function(path, key=key)  # what is wrong with it ends the run here
        tokenizer = load_tokenizer(config.model.policy)
        checks = partial(label_checks, config, has_reward_fn=runtime.reward_fn is not None)
        loaded = load_prompts(config.data, tokenizer, label_checks=checks("data.prompts"))
        notes = loaded.notes("data.prompts")
        per_step = config.rollout.prompts_per_step
        in_flight = config.rollout.in_flight if config.rollout.has_requests_in_flight else None
        notes += few_rows_notes(config.data, loaded.sizes, per_step)
        held_out: Sequence[Prompt] = []
        if config.eval.prompts:
            key = "eval.prompts"
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            of_eval = load_prompts(section, tokenizer, key=key, label_checks=checks(key))
            held_out, notes = of_eval.prompts, notes + of_eval.notes(key)
        limits = Limits.of(config.model.policy)
        limits.check_prompts(loaded.prompts, tokenizer, key="data.prompts")
        limits.check_prompts(held_out, tokenizer, key="eval.prompts")
        for note in notes:
            tell.message(note)
        stop = stop_token_ids(config.model.policy, tokenizer)
        episodes = open_episodes(config, config.model.policy, tokenizer, stop)
        log = log_path(files, workers)
        reward_function = open_function(
            config.reward, runtime.reward_fn, functions_of(config.data.prompts), log=log
        )
        if reward_function is not None and config.reward.processes:
            tell.message(f"what the reward function prints in its processes: {log}")
        attempt = workers.broadcast(uuid.uuid4().hex)
        mix = mix_of(config.data, loaded.sizes, per_step)
        stream = ShuffledStream(loaded.prompts, seed=config.seed, mix=mix)
        return cls(
            config,
            runtime,
            workers,
            files,
            tell,
            tokenizer=tokenizer,
            prompts=loaded.prompts,
            stream=stream,
            rollouts=_rollouts(config, stream, workers),
            attempt=attempt,
            pushes=Pushes() if in_flight else None,
            held_out=held_out,
            reward_function=reward_function,
            reward_servers=open_remote(config.reward),
            eval_function=evaluation_function(config.eval, None if episodes else reward_function),
            sampling=Sampling.of(
                config.rollout,
                stop_token_ids=stop,
                seed=config.seed,
                samples_per_prompt=config.rollout.samples_per_prompt,
                adapter=runtime.name if config.pushes_adapter else None,
                owner=f"{runtime.name}/{attempt}",
                priority=None if in_flight else 0,
                episodes=episodes,
            ),
            transport=open_transport(
                config.rollout.engine,
                colocated=config.placement.group_of("engine") == "colocated",
                share_gpus=config.engines_share_gpus,
                kept=config.pushes_adapter,
                in_flight=in_flight,
            ),
            models=models_of(config),
        )

    def start_services(self) -> Services:
        """Start engines and frozen models; on GPU they are up before the learner is."""
        self.tell.phase("starting the engine and the frozen models")
        services = start_deployments(
            self.config,
            self.name,
            self.workers,
            logs_dir=str(self.files.logs_dir),
            dedicated=self.runtime.dedicated,
            shared=self.runtime.shared,
        )
        self._elsewhere = services.elsewhere
        if torch.cuda.is_available():
            services.wait(self.config.placement.timeout_s)
        shares_gpus = torch.cuda.is_available() and "engine" not in services.elsewhere
        self._phases = Phases(
            self.workers,
            offloads=shares_gpus and self.config.rollout.engine.sleeps,
            engines=services.engine,
            frozen=tuple(each for role, each in services.frozen if role not in services.elsewhere),
        )
        return services

    def enter(self, phase: Phase, *, before_push: bool = False) -> None:
        """Go on to a phase of the step together; on shared GPUs memory changes hands.

        Where rollouts are collected ahead there are no phases: engines share nothing.

        Args:
            before_push: All is sampled that is sampled before the next push.
        """
        if self.is_ahead:
            return
        assert self._phases is not None, "phases begin when the services have started"
        is_replaced = before_push and not self.config.pushes_adapter
        self._phases.enter(phase, before_push=is_replaced)

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.close()
        close_function(self.reward_function)
        if self.sampling.episodes:
            self.sampling.episodes.close()
        super().close()

    @property
    def is_ahead(self) -> bool:
        """Whether rollouts are collected while the learner updates."""
        return isinstance(self.rollouts, AsyncRollouts)

    def engines(self, services: Services) -> Engines:
        """Return the engines, with retries after a push if requests stay in flight meanwhile."""
        if self.pushes or services.joins:
            return EnginesInFlight(services.engine, self.pushes or Pushes())
        return services.engine

    def dispatcher(self, services: Services, workers: Workers) -> Dispatch:
        """Return how a batch is sent to the engines: as one batch of all workers if they share one.

        Args:
            workers: The workers that sample at the same time.
        """
        if services.shared_engine and not self.pushes and not services.joins:
            return partial(dispatch_shared, engines=services.engine, workers=workers)
        return partial(dispatch, engines=self.engines(services))

    def reward_sources(self, services: Services) -> RewardSources:
        """Who scores this run's responses."""
        return RewardSources.from_config(
            self.reward_function,
            tuple(services.rewards.values()),
            servers=self.reward_servers,
            reward=self.config.reward,
            model=self.config.model,
        )

    def scoring(self, services: Services) -> Scoring:
        """A batch's way to its scores and reference log-probs."""
        return Scoring(
            self.reward_sources(services), services.reference, models_apart=services.models_apart
        )

    def push_weights(
        self, learner: OnlineLearner, services: Services, *, version: int
    ) -> dict[str, float]:
        """The learner's weights to the engines; their version is the step that made them.

        A critic's own workers wait, and require the same of engines.
        """
        engine = services.engine
        if not self._has_pushed:
            self._has_pushed = True
            self.tell.phase("waiting for the engine")
            services.wait(self.config.placement.timeout_s)
            if self.workers.rank == 0:  # what an attempt before it has asked dedicated engines
                survivors(engine.pinned().answer_only(self.name, self.attempt))
        if not self.is_ahead:
            self.push_again = PushAgain(
                lambda: self.push_weights(learner, services, version=version), self.workers
            )
        self.enter(Phase.LEARN)
        self.enter(Phase.PUSH)
        metrics: dict[str, float] = {}
        if isinstance(self.rollouts, AsyncRollouts):
            asked = time.perf_counter()
            self.rollouts.settle()
            metrics["perf/wait_for_engines_s"] = time.perf_counter() - asked
        if self.workers.rank == 0 and not services.in_pool:  # those are busy for other runs too
            metrics |= self._load(engine)
        push = self._way_to(services)
        with self.pushes.push() if self.pushes else nullcontext():
            if self.roles.trains_policy:
                metrics |= push(learner, engine, version=version)
            else:
                self._go_on(engine)
            if self.roles.are_apart:
                engine.require(*self.workers.broadcast(engine.required))
            self.enter(Phase.GENERATE)
        metrics |= self._memory(services)
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.arrived(version)
        return metrics

    def _way_to(self, services: Services) -> Callable[..., dict[str, float]]:
        """How a version goes to the engines: all weights, or the adapter beside its base."""
        config = self.config
        joins = self.pushes is not None or services.joins
        probe = Probe.of(self.prompts, config, temperature=config.trained_temperature, joins=joins)
        common: dict[str, Any] = {
            "transport": self.transport,
            "probe": probe,
            "workers": self.roles.own,
            "on_arrival": lambda: self._go_on(services.engine),
        }
        if config.pushes_adapter:
            has_base = services.in_pool
            return partial(push_adapter, name=self.name, engines_have_base=has_base, **common)
        return partial(push_weights, **common)

    def _load(self, engine: EngineClient) -> dict[str, float]:
        """`perf/engine_*` since the push before; when they had nothing to do, in the timeline."""
        up, stretches = engine.pinned(), {}
        for name, answer in zip(up.names, up.stretch(), strict=True):
            for load, stretch in survivors([answer]):
                stretches[name] = load, stretch
                for begin, end in stretch.idle:
                    note_call(name, "idle", begin, end)
        return self._engines_load.metrics(stretches)

    def before_saving(self) -> None:
        """The learner is whole on its devices when it is saved."""
        self.enter(Phase.LEARN)

    def _go_on(self, engine: EngineClient) -> None:
        """The weights have arrived: engines wake for the probe, and what is in flight goes on."""
        self.enter(Phase.PROBE)
        if self.pushes and self.workers.rank == 0:
            survivors(engine.pinned().resume())

    def _write_rollouts(
        self,
        step: int,
        rows: Callable[[], list[dict[str, Any]]],
        workers: Workers,
        *,
        held_out: bool = False,
    ) -> None:
        """Write all workers' rows to one file.

        Args:
            rows: Makes this worker's.
            workers: In the group of the thread that calls.
        """
        shares = workers.gather_first(rollout_table(rows()))
        if workers.rank == 0:
            self.files.write_rollouts(step, merged(shares), held_out=held_out)

    def evaluate_before_first_update(self, services: Services) -> None:
        """The held-out score that the run starts from; it stands in the first step's metrics."""
        if self.last_step == 0 and self.held_out:
            self.tell.phase("evaluating the policy as it is")
            metrics = self._evaluate(services, step=0)
            self.note_initial(metrics)
            self.tell.message(f"before the first update: eval {metrics['eval/score_mean']:+.3f}")

    def evaluate_when_due(self, step: int, services: Services) -> dict[str, float]:
        """The held-out score after a step that has an evaluation, else nothing."""
        is_due = self.config.eval.is_due(step, last_step=self.config.num_steps)
        return self._evaluate(services, step=step) if is_due and self.held_out else {}

    def state_dict(self) -> dict[str, Any]:
        """The data cursor."""
        return {"stream": self.rollouts.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])
        if self.workers.rank == 0:  # unless `restore_share` finds what became of it
            lost = int(state.get("metrics", {}).get("rollout/samples_carried", 0))
            self.rollouts.sample_counts = SampleCounts(carried=lost, lost=lost)

    def finish(self) -> dict[str, Any]:
        """End the run, and report samples that were requested ahead and are not trained."""
        if self.stopped and (
            left := self.workers.sum(as_tensor(self.rollouts.sample_counts.carried))
        ):
            self.tell.message(f"{int(left)} samples were asked for ahead and are not trained")
        return super().finish()

    def save_share(self, directory: Path) -> None:
        """The rollouts that were collected ahead."""
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.save(directory, self.workers)

    def spans_beside(self) -> list[Span]:
        """What was collected ahead meanwhile."""
        return self.rollouts.spans() if isinstance(self.rollouts, AsyncRollouts) else []

    def restore_share(self, directory: Path) -> None:
        """Go on with the rollouts that `save_share` has saved."""
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.restore(directory, self.workers)

    def _memory(self, services: Services) -> dict[str, float]:
        """`perf/memory_<role>_gb` of each role's largest process or replica, and of its GPU.

        It stands after a push, so a step's metrics lack what its own evaluation takes. What samples
        and scores beside the learner answers when it comes to it: what it says is of a step before.
        """
        by_role = {"learner": self.workers.gather(peak_memory())}
        if self.workers.rank == 0:
            asked = services.ask_peak_memory()
            if self.pushes:
                asked, self._memory_asked = self._memory_asked, asked
            # What a replica cannot do any more is reported by what needs it.
            by_role |= {k: survivors(v, passing_over=DeploymentError) for k, v in asked.items()}
            by_role["driver"] = self.tell.driver_memory()
        return {
            f"perf/{kind}_{role}_gb": max(each[kind] for each in peaks if kind in each)
            for role, peaks in by_role.items()
            for kind in sorted({kind for each in peaks for kind in each})
        }

    def _evaluate(self, services: Services, *, step: int) -> dict[str, float]:
        def keep(scored: list[ScoredRollout]) -> None:
            rows = partial(list, map(sample_row, scored))
            self.write_later(partial(self._write_rollouts, step, rows, held_out=True))

        sources = self.reward_sources(services)
        if self.eval_function is not None:  # only the reward models are asked besides
            sources = replace(sources, function=None, servers=None)
        self.enter(Phase.GENERATE)
        return evaluate_policy(
            self.held_out,
            self.engines(services),
            self.tokenizer,
            self.eval_function,
            section=self.config.eval,
            sampling=self.sampling,
            workers=self.workers,
            reward_sources=sources,
            push_again=self.push_again,
            dispatcher=self.dispatcher(services, self.workers),
            before_scoring=lambda: self.enter(Phase.SCORE),
            keep=keep,
        )


def _rollouts(
    config: OnlineConfig, stream: ShuffledStream[Prompt], workers: Workers
) -> SyncRollouts | AsyncRollouts:
    section = config.rollout
    if section.mode == "sync":
        return SyncRollouts(stream, section.samples_per_prompt, workers)
    return AsyncRollouts(
        stream,
        prompts_per_step=section.prompts_per_step,
        samples_per_prompt=section.samples_per_prompt,
        max_staleness=section.staleness,
        overlaps=section.has_requests_in_flight,
        settles=section.mode == "one_step_off",
        num_steps=config.num_steps,
        workers=workers.beside(),
    )
