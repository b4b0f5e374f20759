"""State, metrics and files of a PPO run; the loop is `raypo.recipes.ppo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from raypo.collectives import Workers, as_tensor
from raypo.config import PPOConfig
from raypo.learner.learner import Learner
from raypo.learner.peak import peak_flops
from raypo.learner.roles import Roles
from raypo.learner.state import NonFiniteUpdateError
from raypo.models.critic import critic_start
from raypo.ppo.controllers import UpdateState
from raypo.rollout.dynamic_sampling import Collected, fill_step
from raypo.rollout.sample_counts import sample_count_metrics
from raypo.run.online_run import OnlineRun
from raypo.run.phases import Phase
from raypo.run.rollout_metrics import rollout_metrics, rollout_rows, sample_row
from raypo.run.services import Services
from raypo.run.utilization import Work, step_work, work_metrics
from raypo.types import Experience, ScoredRollout


@dataclass
class PPORun(OnlineRun[PPOConfig]):
    """One worker's view of a PPO run; every method is called by all workers."""

    update_state: UpdateState = field(init=False)
    _work: dict[str, Work] = field(default_factory=dict)
    _peak_flops: float = 0.0
    """Peak FLOP/s of all workers' devices together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.update_state = UpdateState.initial(self.config.ppo)
        self.roles = Roles.of(self.workers, self.config.learner.critic_workers)

    def start_services(self) -> Services:
        """Start engines, reference and reward models, after measuring the devices' peak FLOP/s."""
        # Before the services start, as they would use the devices at the same time.
        mine = peak_flops(self.config.model.dtype, self.config.learner.peak_tflops)
        self._peak_flops = float(self.workers.sum(as_tensor(mine)))
        return super().start_services()

    def start_learner(self) -> Learner:
        """Load policy and critic, restored from the run's last checkpoint if there is one."""
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
                has_other_judges=self.reward_function is not None
                or config.reward.url is not None
                or config.rollout.environment is not None,
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

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """Return the speed of a step, with rates by phase and model FLOPs utilisation (MFU)."""
        speed = super().speed(metrics, step_s)
        work = work_metrics(self._work, metrics | speed, peak_flops=self._peak_flops)
        return speed | work

    def fill(
        self, scored_rollouts: Callable[[int], list[ScoredRollout]], workers: Workers
    ) -> Collected:
        """Sample a step's rollouts, and sample again to replace groups that `ppo.filter` drops.

        Args:
            scored_rollouts: Function that samples and scores a number of prompts.
            workers: The workers that sample together.
        """
        return fill_step(
            scored_rollouts,
            prompts_per_step=self.config.rollout.prompts_per_step,
            section=self.config.ppo.filter,
            reward=self.config.reward,
            workers=workers,
        )

    def describe(self, step: int, collected: Collected) -> dict[str, float]:
        """Return scores and lengths of all workers' rollouts, and counts of samples by outcome."""
        metrics = rollout_metrics(collected.scored, self.workers) | collected.metrics
        self._sampled = collected.scored
        if self.sampling.episodes:
            waited = self.workers.max(as_tensor(self.sampling.episodes.waited_s()))
            metrics["perf/wait_for_environments_s"] = float(waited)
        metrics |= sample_count_metrics(
            self.rollouts.counts(),
            collected,
            self.workers,
            step=step,
            max_staleness=self.config.ppo.correction.max_staleness,
        )
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
                f"{metrics['rollout/refills']:.0f} refills (ppo.filter.max_refills); {rest}"
            )
        return metrics

    def save_rollouts(
        self, step: int, dealt: Sequence[ScoredRollout], experience: Experience
    ) -> None:
        """Write the rollouts that the workers train on to `rollouts/`, in the background."""
        rows = partial(rollout_rows, dealt, experience) if self.roles.trains_policy else list
        self.write_later(partial(self._write_rollouts, step, rows))

    @contextmanager
    def keeping(self, step: int, dealt: Sequence[ScoredRollout]) -> Iterator[None]:
        """Write the samples with their scores if an update in this context is not finite."""
        try:
            yield
        except NonFiniteUpdateError:
            mine = dealt if self.roles.trains_policy else []
            self._write_rollouts(step, partial(list, map(sample_row, mine)), self.workers)
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return data cursor, KL and entropy coefficients, and score normaliser."""
        return super().state_dict() | {"advantages": self.update_state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        super().load_state_dict(state)
        self.update_state = self.update_state.restored(state["advantages"])

    def save_models(self, learner: Learner) -> None:
        """Write the policy to `policy/` and, with LoRA, its adapter to `adapter/`.

        With `learner.save_critic` also write the critic to `critic/`.
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
