"""What online runs share besides what all runs do, and what a PPO run keeps and describes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch

from raypo.cluster.actors import survivors
from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers, as_tensor
from raypo.config import OnlineConfig, PPOConfig, functions_of
from raypo.custom.loader import load_function
from raypo.data.mixing import few_rows_notes, mix_of
from raypo.data.prompts import load_prompts
from raypo.data.stream import PromptStream
from raypo.learner.learner import Learner
from raypo.learner.peak import peak_flops
from raypo.learner.roles import Roles
from raypo.learner.state import NonFiniteUpdateError
from raypo.metrics.clock import Span
from raypo.metrics.process_memory import peak_memory
from raypo.metrics.reduce import WeightedMeans
from raypo.models.critic import critic_start
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.plan.estimate import Models
from raypo.rewards.functions import (
    close_function,
    evaluation_function,
    open_function,
    open_remote,
)
from raypo.rewards.scoring import RewardFunction
from raypo.rollout.ahead import Collect, RolloutsAhead, RolloutsInTurn, Sample
from raypo.rollout.collect import PushAgain, Sampler, Sampling
from raypo.rollout.episodes import open_episodes
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.experience import AdvantageState
from raypo.rollout.in_flight import EnginesInFlight, Pushes
from raypo.rollout.judges import Judges
from raypo.rollout.refill import Collected
from raypo.run.engines_load import EnginesLoad
from raypo.run.handles import EngineHandle
from raypo.run.phases import OffloadingLearner, Phase, Phases
from raypo.run.rollout_metrics import rollout_figures, rollout_rows, sample_row
from raypo.run.run import Run, Saveable, log_path
from raypo.run.services import Services, start_deployments
from raypo.run.setup import Runtime
from raypo.run.utilization import Work, models_of, step_work, work_figures
from raypo.storage.run_files import RunFiles
from raypo.types import Experience, Prompt, ScoredRollout
from raypo.weight_sync.push import Probe, PushedLearner, open_transport, push_adapter, push_weights
from raypo.weights.transport import ObjectTransport, Transport

AnyOnline = TypeVar("AnyOnline", bound=OnlineConfig)

NUM_PROBES = 2


class OnlineLearner(PushedLearner, OffloadingLearner, Saveable, Protocol):
    """What an online run asks of its learner, besides updates."""


@dataclass
class OnlineRun(Run[AnyOnline]):
    """One worker's view of a run that trains on what engines sample; all call every method."""

    tokenizer: Any
    prompts: Sequence[Prompt]
    stream: PromptStream
    held_out: Sequence[Prompt]
    reward_function: RewardFunction | None
    reward_servers: RewardFunction | None
    eval_function: RewardFunction | None
    sampling: Sampling
    transport: Transport
    models: Models | None
    """Their shapes, for the arithmetic that they need; None where they are not known."""
    push_again: PushAgain | None = None
    """The last push once more, for the case that no engine is left that has it; where rollouts are
    collected while the learner updates it is None, for its weights are then of no version."""
    ahead: RolloutsAhead | None = None
    """Where `rollout.mode` samples ahead: the batches of the next steps."""
    pushes: Pushes | None = None
    """Where requests stay under way while weights are pushed: who asks anew waits for their end."""
    _engines_load: EnginesLoad = field(default_factory=EnginesLoad)
    _phases: Phases | None = None
    _elsewhere: frozenset[str] = frozenset()
    """Roles that do not live beside these workers."""

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
        loaded = load_prompts(config.data, tokenizer)
        if loaded.num_skipped:
            tell.message(
                f"{loaded.num_skipped} of {loaded.num_skipped + len(loaded.prompts)} prompts are "
                f"longer than data.max_prompt_tokens ({config.data.max_prompt_tokens}) and skipped"
            )
        per_step = config.rollout.prompts_per_step
        for note in few_rows_notes(config.data, loaded.sizes, per_step):
            tell.message(note)
        held_out: Sequence[Prompt] = []
        if config.eval.prompts:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            held_out = load_prompts(section, tokenizer, key="eval.prompts").prompts
        stop = stop_token_ids(config.model.policy, tokenizer)
        episodes = open_episodes(config, config.model.policy, tokenizer, stop)
        log = log_path(files, workers)
        reward_function = open_function(
            config.reward, runtime.reward_fn, functions_of(config.data.prompts), log=log
        )
        if reward_function is not None and config.reward.processes:
            tell.message(f"what the reward function prints in its processes: {log}")
        mix = mix_of(config.data, loaded.sizes, per_step)
        stream = PromptStream(loaded.prompts, seed=config.seed, mix=mix)
        return cls(
            config,
            runtime,
            workers,
            files,
            tell,
            tokenizer=tokenizer,
            prompts=loaded.prompts,
            stream=stream,
            ahead=RolloutsAhead(
                stream,
                prompts_per_step=config.rollout.prompts_per_step,
                samples_per_prompt=config.rollout.samples_per_prompt,
                max_staleness=config.rollout.staleness,
                settles=config.rollout.mode == "one_step_off",
                is_refilled=config.is_refilled,
                num_steps=config.num_steps,
                workers=workers.beside(),
            )
            if config.rollout.mode != "sync"
            else None,
            pushes=Pushes() if config.rollout.has_requests_in_flight else None,
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
                episodes=episodes,
            ),
            transport=open_transport(
                config.rollout.engine,
                colocated=config.placement.group_of("engine") == "colocated",
                share_gpus=config.engines_share_gpus,
                kept=config.pushes_adapter,
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
            offloads=shares_gpus and self.config.rollout.engine.sleep,
            engines=services.engine,
            frozen=tuple(each for role, each in services.frozen if role not in services.elsewhere),
        )
        return services

    def enter(self, phase: Phase) -> None:
        """Go on to a phase of the step together; on shared GPUs memory changes hands.

        Where rollouts are collected ahead there are no phases: engines share nothing.
        """
        if self.ahead:
            return
        assert self._phases is not None, "phases begin when the services have started"
        self._phases.enter(phase)

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        if self.ahead:
            self.ahead.close()
        close_function(self.reward_function)
        if self.sampling.episodes:
            self.sampling.episodes.close()
        super().close()

    def sampler(self, services: Services) -> Sampler:
        """Who samples responses."""
        if self.pushes or services.joins:
            return EnginesInFlight(services.engine, self.pushes or Pushes())
        return services.engine

    def judges(self, services: Services) -> Judges:
        """Who scores this run's responses."""
        return Judges.of(
            self.reward_function,
            tuple(services.rewards.values()),
            servers=self.reward_servers,
            reward=self.config.reward,
            model=self.config.model,
        )

    @property
    def pushing(self) -> Workers:
        """Those that have the policy."""
        return self.workers

    def push_weights(
        self, learner: OnlineLearner, services: Services, *, version: int
    ) -> dict[str, float]:
        """The learner's weights to the engines; their version is the step that made them."""
        if version == self.last_step:  # the first push of this attempt
            self.tell.phase("waiting for the engine")
            services.wait(self.config.placement.timeout_s)
        if self.ahead is None:
            self.push_again = PushAgain(
                lambda: self.push_weights(learner, services, version=version), self.workers
            )
        config = self.config
        probe = Probe(
            prompts=[prompt.token_ids for prompt in islice(self.prompts, NUM_PROBES)],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.trained_temperature,
            dtype=config.model.dtype,
            seed=config.seed,
            joins=self.pushes is not None or services.joins,
        )
        self.enter(Phase.LEARN)
        self.enter(Phase.PUSH)
        figures: dict[str, float] = {}
        if self.ahead:
            asked = time.perf_counter()
            self.ahead.settle()
            figures["perf/wait_for_engines_s"] = time.perf_counter() - asked
            if self.workers.rank == 0:
                loads = survivors(services.engine.pinned().load.on_all())
                figures |= self._engines_load.figures(loads)
        with self.pushes.push() if self.pushes else nullcontext():
            figures |= self._push(learner, services, version=version, probe=probe)
            self.enter(Phase.GENERATE)
            figures |= self._memory(services)  # an engine tells it between two steps
        if self.ahead:
            self.ahead.arrived(version)
        return figures

    def before_saving(self) -> None:
        """The learner is whole on its devices when it is saved."""
        self.enter(Phase.LEARN)

    def _push(
        self, learner: OnlineLearner, services: Services, *, version: int, probe: Probe
    ) -> dict[str, float]:
        engine = services.engine
        common: dict[str, Any] = {
            "version": version,
            "probe": probe,
            "workers": self.pushing,
            "on_arrival": lambda: self._go_on(engine),
        }
        if self.pushes and self.workers.rank == 0:
            survivors(engine.pinned().pause.on_all(self.config.rollout.in_flight))
        if not self.config.pushes_adapter:
            return push_weights(learner, engine, transport=self.transport, **common)
        assert isinstance(learner, Learner), "the other recipes refuse it"
        assert isinstance(self.transport, ObjectTransport), "`open_transport` keeps what is pushed"
        return push_adapter(
            learner,
            engine,
            name=self.name,
            transport=self.transport,
            engines_have_base=services.in_pool,
            **common,
        )

    def _go_on(self, engine: EngineHandle) -> None:
        """The weights have arrived: engines are awake for the probe, and what is in flight goes on.

        One that was lost meanwhile and was started again was not told to pause.
        """
        self.enter(Phase.PROBE)
        if self.pushes and self.workers.rank == 0:
            survivors(engine.pinned().resume.on_all())

    def open_rollouts(self, sample: Sample, collect: Collect) -> RolloutsInTurn | RolloutsAhead:
        """Where the rollouts of the steps that are left come from, by `rollout.mode`."""
        if self.ahead is None:
            return RolloutsInTurn(sample, collect, self.stream, self.workers)
        self.ahead.begin(sample, collect, last_step=self.last_step)
        return self.ahead

    def _write_rollouts(
        self, step: int, mine: list[dict[str, Any]], *, held_out: bool = False
    ) -> None:
        shares = self.workers.gather_first(mine)
        if self.workers.rank == 0:
            rows = [row for share in shares for row in share]
            rows.sort(key=lambda row: (row["group_index"], row["sample_index"], row["row_index"]))
            self.files.write_rollouts(step, rows, held_out=held_out)

    def evaluate_before_first_update(self, services: Services) -> None:
        """The held-out score that the run starts from; it stands in the first step's metrics."""
        if self.last_step == 0 and self.held_out:
            self.tell.phase("evaluating the policy as it is")
            figures = self._evaluate(services, step=0)
            self.note_initial(figures)
            self.tell.message(f"before the first update: eval {figures['eval/score_mean']:+.3f}")

    def evaluate_when_due(self, step: int, services: Services) -> dict[str, float]:
        """The held-out score after a step that has an evaluation, else nothing."""
        is_due = step % self.config.eval.every == 0 or step == self.config.num_steps
        return self._evaluate(services, step=step) if is_due and self.held_out else {}

    def state_dict(self) -> dict[str, Any]:
        """The data cursor."""
        return {"stream": self.ahead.position() if self.ahead else self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])

    def save_share(self, directory: Path) -> None:
        """The rollouts that were collected ahead."""
        if self.ahead:
            self.ahead.save(directory, self.workers)

    def spans_beside(self) -> list[Span]:
        """What was collected ahead meanwhile."""
        return self.ahead.spans() if self.ahead else []

    def restore_share(self, directory: Path) -> None:
        """See `save_share`."""
        if self.ahead:
            self.ahead.restore(directory, self.workers)

    def _memory(self, services: Services) -> dict[str, float]:
        """`perf/memory_<role>_gb` of each role's largest process or replica, and of its GPU.

        It stands after a push, so a step's figures lack what its own evaluation takes.
        """
        by_role = {"learner": self.workers.gather(peak_memory())}
        if self.workers.rank == 0:
            by_role |= services.peak_memory()
            by_role["driver"] = self.tell.driver_memory()
        return {
            f"perf/{kind}_{role}_gb": max(each[kind] for each in peaks if kind in each)
            for role, peaks in by_role.items()
            for kind in sorted({kind for each in peaks for kind in each})
        }

    def _evaluate(self, services: Services, *, step: int) -> dict[str, float]:
        def keep(scored: list[ScoredRollout]) -> None:
            self._write_rollouts(step, [sample_row(each) for each in scored], held_out=True)

        judges = self.judges(services)
        if self.eval_function is not None:  # only the reward models are asked besides
            judges = replace(judges, function=None, servers=None)
        self.enter(Phase.GENERATE)
        return evaluate_policy(
            self.held_out,
            self.sampler(services),
            self.tokenizer,
            self.eval_function,
            section=self.config.eval,
            sampling=self.sampling,
            workers=self.workers,
            judges=judges,
            push_again=self.push_again,
            before_judging=lambda: self.enter(Phase.SCORE),
            keep=keep,
        )


@dataclass
class PPORun(OnlineRun[PPOConfig]):
    """One worker's view of a PPO run; every method is called by all workers."""

    advantage_state: AdvantageState = field(init=False)
    roles: Roles = field(init=False)
    """Who trains policy and critic."""
    _work: dict[str, Work] = field(default_factory=dict)
    _peak_flops: float = 0.0
    """FLOP/s of all workers' devices together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.advantage_state = AdvantageState.of(self.config.ppo)
        self.roles = Roles.of(self.workers, self.config.learner.critic_workers)

    def start_learner(self) -> Learner:
        """Policy and critic, restored from the run's last checkpoint where there is one."""
        self.enter(Phase.LEARN)
        self.tell.phase("loading policy and critic")
        config = self.config
        learner = Learner(
            config.model,
            config.ppo,
            config.learner,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_response_tokens,
            num_steps=config.num_steps,
            seed=config.seed,
            critic_start=critic_start(
                config.model,
                config.reward.weights,
                has_other_judges=self.reward_function is not None or config.reward.url is not None,
                normalizes=config.ppo.shaping.normalize,
            ),
            workers=self.workers,
            roles=self.roles,
        )
        assert self._phases is not None
        self._phases.learner = learner
        if start := self.workers.gather(learner.critic_start)[-1]:
            self.tell.message(f"critic: {start}")
        self.restore(learner)
        return learner

    @property
    def pushing(self) -> Workers:
        """Those that have the policy; where this worker has none, it does not push."""
        return self.roles.own

    def push_weights(
        self, learner: OnlineLearner, services: Services, *, version: int
    ) -> dict[str, float]:
        """As of all online runs; the first says what the devices could do at most."""
        figures = super().push_weights(learner, services, version=version)
        if not self._peak_flops:  # measured while nobody else is at work
            mine = peak_flops(self.config.model.dtype, self.config.learner.peak_tflops)
            self._peak_flops = float(self.workers.sum(as_tensor(mine)))
        return figures

    def _push(
        self, learner: OnlineLearner, services: Services, *, version: int, probe: Probe
    ) -> dict[str, float]:
        """As of all online runs; a critic's own workers wait, and require the same of engines."""
        engine, figures = services.engine, dict[str, float]()
        if self.roles.trains_policy:
            figures = super()._push(learner, services, version=version, probe=probe)
        else:
            self._go_on(engine)
        if self.roles.are_apart:
            engine.require(*self.workers.broadcast(engine.required))
        return figures

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """Also rates by phase, and the share of the devices' arithmetic that was put to use."""
        figures = super().speed(metrics, step_s)
        seconds = metrics | figures
        return figures | work_figures(self._work, seconds, peak_flops=self._peak_flops)

    def describe(self, step: int, collected: Collected) -> dict[str, float]:
        """Scores and lengths of all workers' rollouts, and what became of each sample."""
        figures = rollout_figures(collected.scored, self.workers) | collected.figures
        self._sampled = collected.scored
        if self.sampling.episodes:
            waited = self.workers.max(as_tensor(self.sampling.episodes.waited_s()))
            figures["perf/wait_for_environments_s"] = float(waited)
        if self.ahead:
            figures |= self._accounts(step, collected)
        self._work = step_work(
            collected,
            self.models,
            self.config,
            self.workers,
            step=step,
            elsewhere=self._elsewhere,
        )
        missing, wanted = collected.missing_groups, self.config.rollout.prompts_per_step
        if missing:
            rest = "no update" if missing == wanted else f"trains on {wanted - missing} groups"
            self.tell.message(
                f"step {step}: {missing} of {wanted} groups are missing after "
                f"{figures['rollout/refills']:.0f} refills (ppo.filter.max_refills); {rest}"
            )
        return figures

    def _accounts(self, step: int, collected: Collected) -> dict[str, float]:
        """What is not trained in this step of all that was asked for, over all workers.

        A step's samples are trained, filtered, failed or dropped; all others that were asked for
        are carried on to the steps after it.
        """
        assert self.ahead is not None
        carried, again = self.ahead.carried()
        means = WeightedMeans()
        means.total("rollout/samples_carried", carried)
        means.total("rollout/samples_asked_again", again)
        if (most := self.config.ppo.correction.max_staleness) is not None:
            newest: dict[tuple[int, int], int] = {}  # of each sample, all its rows together
            for rollout in (each.rollout for each in collected.trained):
                sample = rollout.group_index, rollout.sample_index
                versions = rollout.weight_versions[rollout.response_mask]
                newest[sample] = max(versions.max(), newest.get(sample, -1))
            dropped = sum(step - 1 - version > most for version in newest.values())
            means.total("rollout/samples_dropped", dropped)
        figures = means.reduce(self.workers)
        trained = collected.figures["rollout/samples_trained"]
        figures["rollout/samples_trained"] = trained - figures.get("rollout/samples_dropped", 0.0)
        return figures

    def save_rollouts(
        self, step: int, dealt: Sequence[ScoredRollout], experience: Experience
    ) -> None:
        """All workers' dealt rollouts into `rollouts/`."""
        mine = rollout_rows(dealt, experience) if self.roles.trains_policy else []
        self._write_rollouts(step, mine)

    @contextmanager
    def keeping(self, step: int, dealt: Sequence[ScoredRollout]) -> Iterator[None]:
        """Also write what an update goes wrong with: the samples with their scores."""
        try:
            yield
        except NonFiniteUpdateError:
            mine = dealt if self.roles.trains_policy else []
            self._write_rollouts(step, [sample_row(each) for each in mine])
            raise

    def state_dict(self) -> dict[str, Any]:
        """Data cursor, KL coefficient and score normaliser."""
        return super().state_dict() | {"advantages": self.advantage_state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        super().load_state_dict(state)
        self.advantage_state = self.advantage_state.restored(state["advantages"])

    def save_models(self, learner: Learner) -> None:
        """The policy into the run's `policy/`, with LoRA also its adapter into `adapter/`.

        The critic goes into `critic/` where it is asked for.
        """
        roles, tokenizer = self.roles, self.tokenizer
        written: dict[Path, Callable[[Path], None]] = {}
        if roles.trains_policy:
            written[self.files.policy_dir] = lambda folder: learner.save_policy(folder, tokenizer)
            if self.config.model.lora:
                written[self.files.adapter_dir] = learner.save_adapter
        if roles.trains_critic and self.config.learner.save_critic:
            written[self.files.critic_dir] = lambda folder: learner.save_critic(folder, tokenizer)
        for final, write in written.items():
            self.replace_folder(final, write, workers=roles.own)
