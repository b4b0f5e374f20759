"""Shared code of all online recipes: sampling, scoring, weight sync and evaluation.

Concurrency. The main thread of each worker runs the loop. If rollouts are collected ahead
(`AsyncRollouts`), background threads sample and score meanwhile, and `Pushes` lets them wait for
the end of a push. A writer thread (`BackgroundWriter`) writes rollout files.
"""

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
from raypo.cluster.run_monitor import MonitorClient
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
from raypo.models.model_shape import Models
from raypo.pending import Pending
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
    """Methods of a learner that an online run calls, besides the update."""


@dataclass
class OnlineRun(Run[AnyOnline]):
    """One worker's view of a run that trains on sampled responses; all workers call each method."""

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
    """Shapes of the models, to count their FLOPs. None if they are not known."""
    rollouts: SyncRollouts | AsyncRollouts
    """Source of each step's rollouts."""
    attempt: str
    """Id of this attempt of the run; engines may outlive an attempt."""
    push_again: PushAgain | None = None
    """Repeats the last push if no engine is left that holds it. None if rollouts are collected
    during updates, because the learner's weights then belong to no version."""
    pushes: Pushes | None = None
    """Holds back new requests during a push. None if no requests stay in flight during pushes."""
    roles: Roles = field(init=False)
    """Assignment of workers to policy and critic."""
    _engines_load: EnginesLoad = field(default_factory=EnginesLoad)
    _has_pushed: bool = False
    _memory_asked: Mapping[str, Sequence[Pending[dict[str, float]]]] = field(default_factory=dict)
    _phases: Phases | None = None
    _elsewhere: frozenset[str] = frozenset()
    """Roles that are not colocated with these workers."""

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
        """Load the prompts and the user's functions, and return the run."""
        for key, path in config.own_functions.items():
            load_function(path, key=key)  # fail early: a bad function ends the run here
        tokenizer = load_tokenizer(config.model.policy)
        limits = Limits.of(config.model.policy)
        checks = partial(label_checks, config, has_reward_fn=runtime.reward_fn is not None)
        loaded = load_prompts(config.data, tokenizer, label_checks=checks("data.prompts"))
        limits.check([[loaded.highest]], tokenizer, key="data.prompts")
        notes = loaded.notes("data.prompts")
        per_step = config.rollout.prompts_per_step
        in_flight = config.rollout.in_flight if config.rollout.has_requests_in_flight else None
        notes += few_rows_notes(config.data, loaded.sizes, per_step)
        held_out: Sequence[Prompt] = []
        if config.eval.prompts:
            key = "eval.prompts"
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            of_eval = load_prompts(section, tokenizer, key=key, label_checks=checks(key))
            limits.check([[of_eval.highest]], tokenizer, key=key)
            held_out, notes = of_eval.prompts, notes + of_eval.notes(key)
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
        """Start engines, reference and reward models. On GPUs this waits until they are up."""
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
        """Enter a phase of the step; all workers call it. On shared GPUs this moves models.

        Args:
            phase: The phase to enter.
            before_push: Whether the engines sample nothing more before the next push, so that they
                can drop their weights instead of keeping them on the host.
        """
        if self.is_ahead:
            return  # engines run beside the learner and share no GPU with it
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
        """True if rollouts are collected while the learner updates."""
        return isinstance(self.rollouts, AsyncRollouts)

    def engines(self, services: Services) -> Engines:
        """Return the engines, with retries after a push if requests stay in flight during it."""
        if self.pushes or services.joins:
            return EnginesInFlight(services.engine, self.pushes or Pushes())
        return services.engine

    def dispatcher(self, services: Services, workers: Workers) -> Dispatch:
        """Return the dispatch function: one batch of all workers if they share an engine.

        Args:
            services: The engines.
            workers: The workers that sample at the same time.
        """
        if services.shared_engine and not self.pushes and not services.joins:
            return partial(dispatch_shared, engines=services.engine, workers=workers)
        return partial(dispatch, engines=self.engines(services))

    def reward_sources(self, services: Services) -> RewardSources:
        """Return the reward function, reward servers and reward models of this run."""
        return RewardSources.from_config(
            self.reward_function,
            tuple(services.rewards.values()),
            servers=self.reward_servers,
            reward=self.config.reward,
            model=self.config.model,
        )

    def scoring(self, services: Services) -> Scoring:
        """Return the scoring of one batch: scores and reference log-probs."""
        return Scoring(
            self.reward_sources(services), services.reference, models_apart=services.models_apart
        )

    def push_weights(
        self, learner: OnlineLearner, services: Services, *, version: int
    ) -> dict[str, float]:
        """Push the learner's weights to the engines. All workers call it.

        Workers that only train a critic wait for the others.

        Args:
            learner: The learner.
            services: The engines.
            version: Version of the weights: the step whose update produced them.

        Returns:
            Metrics of the push, of memory, and of the engines' load.
        """
        engine = services.engine
        if not self._has_pushed:
            self._has_pushed = True
            self.tell.phase("waiting for the engine")
            services.wait(self.config.placement.timeout_s)
            if self.workers.rank == 0:  # cancel requests of an earlier attempt
                survivors(engine.pinned().cancel_other_attempts(self.name, self.attempt))
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
        if self.workers.rank == 0 and not services.in_pool:  # a pool's load is not this run's alone
            metrics |= self._load(engine)
        push = self._way_to(services)
        with self.pushes.push() if self.pushes else nullcontext():
            if self.roles.trains_policy:
                metrics |= push(learner, engine, version=version)
            else:
                self._go_on(engine)
            if self.roles.are_apart:  # critic workers took no part in the push
                engine.require(*self.workers.broadcast(engine.required))
            self.enter(Phase.GENERATE)
        metrics |= self._memory(services)
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.arrived(version)
        return metrics

    def _way_to(self, services: Services) -> Callable[..., dict[str, float]]:
        """Return the push function: of all weights, or of the adapter only."""
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
        """Return `perf/engine_*` since the last push; note engines' idle times in the trace."""
        up, stretches = engine.pinned(), {}
        for name, answer in zip(up.names, up.stretch(), strict=True):
            for load, stretch in survivors([answer]):
                stretches[name] = load, stretch
                for begin, end in stretch.idle:
                    note_call(name, "idle", begin, end)
        return self._engines_load.metrics(stretches)

    def before_saving(self) -> None:
        """Bring the learner's whole state back to its devices."""
        self.enter(Phase.LEARN)

    def _go_on(self, engine: EngineClient) -> None:
        """Wake the engines for the probe, and resume requests in flight, once weights arrived."""
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
            step: The step that the file is named after.
            rows: Function that makes this worker's rows.
            workers: The workers in the process group of the calling thread.
            held_out: Whether the rows are of an evaluation.
        """
        shares = workers.gather_first(rollout_table(rows()))
        if workers.rank == 0:
            self.files.write_rollouts(step, merged(shares), held_out=held_out)

    def evaluate_before_first_update(self, services: Services) -> None:
        """Evaluate the initial policy; the score is reported with the first step."""
        if self.last_step == 0 and self.held_out:
            self.tell.phase("evaluating the policy as it is")
            metrics = self._evaluate(services, step=0)
            self.note_initial(metrics)
            self.tell.message(f"before the first update: eval {metrics['eval/score_mean']:+.3f}")

    def evaluate_when_due(self, step: int, services: Services) -> dict[str, float]:
        """Evaluate the policy if an evaluation is due after this step; else return no metrics."""
        is_due = self.config.eval.is_due(step, last_step=self.config.num_steps)
        return self._evaluate(services, step=step) if is_due and self.held_out else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor."""
        return {"stream": self.rollouts.position()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])
        # Samples in flight count as lost, unless `restore_share` finds them.
        if self.workers.rank == 0:
            lost = int(state.get("metrics", {}).get("rollout/samples_carried", 0))
            self.rollouts.sample_counts = SampleCounts(carried=lost, lost=lost)

    def finish(self) -> dict[str, Any]:
        """End the run, and report samples that were requested ahead but not trained."""
        if self.stopped and (
            left := self.workers.sum(as_tensor(self.rollouts.sample_counts.carried))
        ):
            self.tell.message(f"{int(left)} samples were asked for ahead and are not trained")
        return super().finish()

    def save_share(self, directory: Path) -> None:
        """Save the rollouts that were collected ahead."""
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.save(directory, self.workers)

    def spans_beside(self) -> list[Span]:
        """Return the time spans of collecting rollouts ahead."""
        return self.rollouts.spans() if isinstance(self.rollouts, AsyncRollouts) else []

    def restore_share(self, directory: Path) -> None:
        """Load the rollouts that `save_share` saved."""
        if isinstance(self.rollouts, AsyncRollouts):
            self.rollouts.restore(directory, self.workers)

    def _memory(self, services: Services) -> dict[str, float]:
        """Return peak memory, such as `perf/memory_<role>_gb`, of each role's largest process.

        Measured after a push, so the peak of a step's own evaluation counts in the next step.
        """
        by_role = {"learner": self.workers.gather(peak_memory())}
        if self.workers.rank == 0:
            asked = services.ask_peak_memory()
            if self.pushes:  # replicas are sampling: read the answers that the last push requested
                asked, self._memory_asked = self._memory_asked, asked
            # A broken replica is reported by the code that needs it, not by this metric.
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
        if self.eval_function is not None:  # it replaces the reward function, not the models
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
