"""What a PPO run reads, keeps and describes, besides what all runs do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from raypo.cluster.messenger import MonitorClient
from raypo.collectives import Workers, as_tensor
from raypo.config import PPOConfig
from raypo.data.prompts import load_prompts, repetition_note
from raypo.data.stream import Draw, PromptStream
from raypo.learner.learner import Learner
from raypo.learner.peak import peak_flops
from raypo.metrics.clock import Clock, Span
from raypo.metrics.process_memory import peak_memory
from raypo.models.critic import critic_start
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.plan.estimate import Models
from raypo.rewards.loader import load_function
from raypo.rewards.scoring import RewardFunction
from raypo.rewards.sources import close_function, open_function, open_remote
from raypo.rollout.ahead import Collect, Rollouts, RolloutsAhead, RolloutsInTurn
from raypo.rollout.collect import PushAgain, Sampler, Sampling
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.experience import AdvantageState
from raypo.rollout.first_answers import Recalling
from raypo.rollout.judges import Judges
from raypo.rollout.refill import Collected
from raypo.run.phases import Phase, Phases
from raypo.run.rollout_metrics import rollout_figures, rollout_rows, sample_row
from raypo.run.run import Run
from raypo.run.services import Services, start_deployments
from raypo.run.setup import Runtime
from raypo.run.utilization import Work, models_of, step_work, work_figures
from raypo.storage.run_files import RunFiles
from raypo.types import Experience, Prompt, ScoredRollout
from raypo.weight_sync.push import Probe, open_transport, push_adapter, push_weights
from raypo.weights.transport import ObjectTransport, Transport

NUM_PROBES = 2


@dataclass
class PPORun(Run[PPOConfig]):
    """One worker's view of a PPO run; every method is called by all workers."""

    tokenizer: Any
    prompts: list[Prompt]
    stream: PromptStream
    held_out: list[Prompt]
    reward_function: RewardFunction | None
    reward_servers: RewardFunction | None
    eval_function: RewardFunction | None
    sampling: Sampling
    advantage_state: AdvantageState
    transport: Transport
    models: Models | None
    """Their shapes, for the arithmetic that they need; None where they are not known."""
    push_again: PushAgain | None = None
    """The last push once more, for the case that no engine is left that has it; where rollouts are
    collected while the learner updates it is None, for its weights are then of no version."""
    ahead: RolloutsAhead | None = None
    """Where `rollout.mode` samples ahead: the batches of the next steps."""
    _recalling: Recalling | None = None
    """Before the first update of a sweep's trial: what other trials were answered."""
    _phases: Phases | None = None
    _work: dict[str, Work] = field(default_factory=dict)
    _elsewhere: frozenset[str] = frozenset()
    """Roles that do not live beside these workers."""
    _peak_flops: float = 0.0
    """FLOP/s of all workers' devices together."""

    @classmethod
    def prepare(
        cls,
        config: PPOConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """The run with its prompts read and its functions loaded."""
        tokenizer = load_tokenizer(config.model.policy)
        loaded = load_prompts(config.data, tokenizer)
        if loaded.num_skipped:
            tell.message(
                f"{loaded.num_skipped} of {loaded.num_skipped + len(loaded.prompts)} prompts are "
                f"longer than data.max_prompt_tokens ({config.data.max_prompt_tokens}) and skipped"
            )
        if note := repetition_note(len(loaded.prompts), config.rollout.prompts_per_step):
            tell.message(note)
        held_out: list[Prompt] = []
        if config.eval.prompts:
            section = config.data.model_copy(update={"prompts": config.eval.prompts})
            held_out = load_prompts(section, tokenizer, key="eval.prompts").prompts
        reward_function = open_function(config.reward, runtime.reward_fn)
        stream = PromptStream(loaded.prompts, seed=config.seed)
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
                max_staleness=config.rollout.staleness,
                settles=config.rollout.mode == "one_step_off",
                num_steps=config.num_steps,
                workers=workers.beside(),
            )
            if config.rollout.mode != "sync"
            else None,
            held_out=held_out,
            reward_function=reward_function,
            reward_servers=open_remote(config.reward),
            eval_function=load_function(config.eval.function, key="eval.function")
            if config.eval.function
            else reward_function,
            sampling=Sampling.of(
                config.rollout,
                stop_token_ids=stop_token_ids(config.model.policy, tokenizer),
                seed=config.seed,
                samples_per_prompt=config.rollout.samples_per_prompt,
                adapter=runtime.name if _pushes_adapter(config) else None,
            ),
            advantage_state=AdvantageState.of(config.ppo.kl),
            transport=open_transport(
                config.rollout.engine,
                colocated=config.placement.group_of("engine") == "colocated",
                kept=_pushes_adapter(config),
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
        shared = self.runtime.shared
        if shared is not None and shared.first_answers is not None:
            self._recalling = Recalling(services.engine, shared.first_answers, self.config)
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
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.seed,
            critic_start=critic_start(
                config.model,
                config.reward.weights,
                has_other_judges=self.reward_function is not None or config.reward.url is not None,
                normalizes=config.ppo.shaping.normalize,
            ),
            workers=self.workers,
        )
        assert self._phases is not None
        self._phases.learner = learner
        if learner.critic_start:
            self.tell.message(f"critic: {learner.critic_start}")
        self.restore(learner)
        return learner

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        if self.ahead:
            self.ahead.close()
        close_function(self.reward_function)
        super().close()

    def sampler(self, services: Services) -> Sampler:
        """Who samples responses: the engines, asked through what a sweep's trials share if any."""
        return self._recalling or services.engine

    def judges(self, services: Services) -> Judges:
        """Who scores this run's responses."""
        return Judges.of(
            self.reward_function,
            services.reward_models,
            servers=self.reward_servers,
            reward=self.config.reward,
            model=self.config.model,
        )

    def push_weights(
        self, learner: Learner, services: Services, *, version: int
    ) -> dict[str, float]:
        """The learner's weights to the engines; their version is the step that made them."""
        if version == self.last_step:  # the first push of this attempt
            self.tell.phase("waiting for the engine")
            services.wait(self.config.placement.timeout_s)
            mine = peak_flops(self.config.model.dtype, self.config.learner.peak_tflops)
            self._peak_flops = float(self.workers.sum(as_tensor(mine)))
        if self.ahead is None:
            self.push_again = PushAgain(
                lambda: self.push_weights(learner, services, version=version), self.workers
            )
        if version > 0:
            self._recalling = None
        config = self.config
        probe = Probe(
            prompts=[prompt.token_ids for prompt in self.prompts[:NUM_PROBES]],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            dtype=config.model.dtype,
            seed=config.seed,
        )
        self.enter(Phase.LEARN)
        self.enter(Phase.PUSH)
        with self._engines_to_itself() as waited:
            figures = self._push(learner, services, version=version, probe=probe) | waited
            self.enter(Phase.GENERATE)
            figures |= self._memory(services)  # an engine tells it between two rounds
        if self.ahead:
            self.ahead.arrived(version)
        return figures

    def before_saving(self) -> None:
        """The learner is whole on its devices when it is saved."""
        self.enter(Phase.LEARN)

    def _push(
        self, learner: Learner, services: Services, *, version: int, probe: Probe
    ) -> dict[str, float]:
        engine = services.engine
        common: dict[str, Any] = {
            "version": version,
            "probe": probe,
            "workers": self.workers,
            "on_arrival": lambda: self.enter(Phase.PROBE),
        }
        if not _pushes_adapter(self.config):
            return push_weights(learner, engine, transport=self.transport, **common)
        assert isinstance(self.transport, ObjectTransport), "`open_transport` keeps what is pushed"
        return push_adapter(
            learner,
            engine,
            name=self.name,
            transport=self.transport,
            engines_have_base=services.in_pool,
            **common,
        )

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """Also rates by phase, and the share of the devices' arithmetic that was put to use."""
        figures = super().speed(metrics, step_s)
        seconds = metrics | figures
        return figures | work_figures(self._work, seconds, peak_flops=self._peak_flops)

    def open_rollouts(self, collect: Collect) -> Rollouts:
        """Where the rollouts of the steps that are left come from, by `rollout.mode`."""
        if self.ahead is None:
            return RolloutsInTurn(collect, self.workers)
        self.ahead.begin(collect, version=self.last_step, last_step=self.last_step)
        return self.ahead

    def round_of_sampling(self, clock: Clock) -> AbstractContextManager[None]:
        """What is drawn, sampled and judged without a push or an evaluation in between."""
        return self.ahead.round(clock) if self.ahead else nullcontext()

    def draw_prompts(self, count: int) -> Sequence[Draw]:
        """This worker's share of the next prompts, `count` over all workers."""
        draws = self.stream.take(count)
        return draws[self.workers.rank :: self.workers.count]

    def describe(self, step: int, collected: Collected) -> dict[str, float]:
        """Scores and lengths of all workers' rollouts, and what became of each sample."""
        figures = rollout_figures(collected.scored, self.workers) | collected.figures
        self._work = step_work(
            collected,
            self.models,
            self.config,
            self.workers,
            step=step,
            elsewhere=self._elsewhere,
        )
        if self._recalling and all(self.workers.gather(self._recalling.has_recalled)):
            del self._work["generate"]  # another trial did it
        missing, wanted = collected.missing_groups, self.config.rollout.prompts_per_step
        if missing:
            rest = "no update" if missing == wanted else f"trains on {wanted - missing} groups"
            self.tell.message(
                f"step {step}: {missing} of {wanted} groups are missing after "
                f"{figures['rollout/refills']:.0f} refills (ppo.filter.max_refills); {rest}"
            )
        return figures

    def save_rollouts(
        self, step: int, dealt: Sequence[ScoredRollout], experience: Experience
    ) -> None:
        """All workers' dealt rollouts into `rollouts/`, before the update that might go wrong."""
        shares = self.workers.gather(rollout_rows(dealt, experience))
        if self.workers.rank == 0:
            rows = [row for share in shares for row in share]
            rows.sort(key=lambda row: (row["group_index"], row["sample_index"]))
            self.files.write_rollouts(step, rows)

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
        """Data cursor, KL coefficient and score normaliser."""
        return {
            "stream": self.ahead.position() if self.ahead else self.stream.state_dict(),
            "advantages": self.advantage_state.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.stream.load_state_dict(state["stream"])
        self.advantage_state = self.advantage_state.restored(state["advantages"])

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

    def save_models(self, learner: Learner) -> None:
        """The policy into the run's `policy/`, with LoRA also its adapter into `adapter/`.

        The critic goes into `critic/` where it is asked for.
        """
        self.replace_folder(
            self.files.policy_dir, lambda folder: learner.save_policy(folder, self.tokenizer)
        )
        if self.config.model.lora:
            self.replace_folder(self.files.adapter_dir, learner.save_adapter)
        if self.config.learner.save_critic:
            self.replace_folder(
                self.files.critic_dir, lambda folder: learner.save_critic(folder, self.tokenizer)
            )

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
            shares = self.workers.gather([sample_row(each) for each in scored])
            if self.workers.rank == 0:
                rows = [row for share in shares for row in share]
                rows.sort(key=lambda row: (row["group_index"], row["sample_index"]))
                self.files.write_rollouts(step, rows, held_out=True)

        self.enter(Phase.GENERATE)
        with self._engines_to_itself():
            return evaluate_policy(
                self.held_out,
                self.sampler(services),
                self.tokenizer,
                self.eval_function,
                section=self.config.eval,
                sampling=self.sampling,
                workers=self.workers,
                judges=self.judges(services),
                push_again=self.push_again,
                before_judging=lambda: self.enter(Phase.SCORE),
                keep=keep,
            )

    @contextmanager
    def _engines_to_itself(self) -> Iterator[dict[str, float]]:
        """While nobody samples ahead; all workers enter before one goes on."""
        if self.ahead is None:
            yield {}
            return
        with self.ahead.paused() as waited:
            self.workers.barrier()
            yield {"perf/wait_for_engines_s": waited}


def _pushes_adapter(config: PPOConfig) -> bool:
    lora = config.model.lora
    return lora is not None and lora.push == "adapter"
