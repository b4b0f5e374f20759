"""The machine room of the PPO loop: what a worker opens, keeps, reports and closes."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint

from raypo.cluster.monitor import Teller
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.data.prompts import load_prompts
from raypo.data.stream import Draw, PromptStream
from raypo.learner.learner import Learner
from raypo.metrics.clock import Clock
from raypo.metrics.logs import log_to_file
from raypo.metrics.run_files import RunFiles
from raypo.metrics.summary import installed_versions, summarize
from raypo.metrics.tensorboard import TensorBoard
from raypo.models.loading import load_tokenizer, stop_token_ids
from raypo.recipes.figures import rollout_figures, rollout_rows, speed_figures
from raypo.recipes.services import Services, start_deployments
from raypo.recipes.setup import Runtime, open_setup
from raypo.rewards.loader import load_function
from raypo.rollout.advantages import AdvantageState
from raypo.rollout.collect import RewardFunction, Sampling
from raypo.rollout.dealing import Deal
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.refill import Collected
from raypo.rollout.sync_weights import Probe, push_weights
from raypo.types import Experience, Prompt
from raypo.weights.transport import ObjectTransport

NUM_PROBES = 2


@dataclass
class Run:
    """One worker's view of a run that is going on; every method is called by all workers."""

    config: PPOConfig
    name: str
    workers: Workers
    files: RunFiles
    tell: Teller
    tokenizer: Any
    prompts: list[Prompt]
    stream: PromptStream
    held_out: list[Prompt]
    reward_function: RewardFunction
    eval_function: RewardFunction
    sampling: Sampling
    advantage_state: AdvantageState
    last_step: int = 0
    """The last step that is done."""
    interrupted: bool = False
    _transport: ObjectTransport = field(default_factory=ObjectTransport)
    _board: TensorBoard | None = None
    _initial: dict[str, float] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)
    _earlier_s: float = 0.0
    """Seconds that earlier attempts took, up to their checkpoint."""
    _step_started: float = 0.0

    def start_services(self) -> Services:
        """Start engines and frozen models; on GPU they are up before the learner is."""
        self._phase("starting the engine and the frozen models")
        services = start_deployments(
            self.config, self.name, self.workers, logs_dir=str(self.files.logs_dir)
        )
        if torch.cuda.is_available():
            services.wait(self.config.placement.timeout_s)
        return services

    def start_learner(self) -> Learner:
        """Policy and critic, restored from the run's last checkpoint where there is one."""
        self._phase("loading policy and critic")
        config = self.config
        learner = Learner(
            config.model,
            config.ppo,
            config.learner,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_new_tokens,
            seed=config.seed,
            workers=self.workers,
        )
        # Once more: DeepSpeed and transformers have brought loggers of their own.
        log_to_file(log_path(self.files, self.workers))
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                self._restore(Path(directory), learner)
        elif self.workers.rank == 0:
            self.files.truncate(after_step=0)
        return learner

    def push_weights(
        self, learner: Learner, services: Services, *, version: int
    ) -> dict[str, float]:
        """The learner's weights to the engines; their version is the step that made them."""
        if version == self.last_step:  # the first push of this attempt
            self._phase("waiting for the engine")
            services.wait(self.config.placement.timeout_s)
        config = self.config
        probe = Probe(
            prompts=[prompt.token_ids for prompt in self.prompts[:NUM_PROBES]],
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            dtype=config.model.dtype,
            seed=config.seed,
        )
        return push_weights(
            learner,
            services.engine,
            version=version,
            transport=self._transport,
            probe=probe,
            workers=self.workers,
        )

    def steps(self) -> Iterator[int]:
        """The steps that are left, counted from 1; ends early when the driver wants to stop."""
        first = self.last_step + 1
        if self.workers.rank == 0 and self.config.logging.tensorboard:
            self._board = TensorBoard(self.files.folder, first_step=first)
        self.tell.start(first)
        self.interrupted = self.workers.broadcast(self.tell.stop_requested())
        for step in range(first, self.config.num_steps + 1):
            if self.interrupted:  # asked for during a step: `checkpoint_when_due` has seen to it
                return
            self._step_started = time.perf_counter()
            yield step

    def draw_prompts(self, count: int) -> Sequence[Draw]:
        """This worker's share of the next prompts, `count` over all workers."""
        draws = self.stream.take(count)
        return draws[self.workers.rank :: self.workers.count]

    def describe(self, step: int, collected: Collected) -> dict[str, float]:
        """Scores and lengths of all workers' rollouts, and what became of each sample."""
        figures = rollout_figures(collected.scored, self.workers) | collected.figures
        missing, wanted = collected.missing_groups, self.config.rollout.prompts_per_step
        if missing:
            rest = "no update" if missing == wanted else f"trains on {wanted - missing} groups"
            self.tell.message(
                f"step {step}: {missing} of {wanted} groups are missing after "
                f"{figures['rollout/refills']:.0f} refills (ppo.filter.max_refills); {rest}"
            )
        return figures

    def save_rollouts(self, step: int, deal: Deal, experience: Experience) -> None:
        """All workers' dealt rollouts into `rollouts/`, before the update that might go wrong."""
        shares = self.workers.gather(rollout_rows(deal, experience))
        if self.workers.rank == 0:
            rows = [row for share in shares for row in share]
            rows.sort(key=lambda row: (row["group_index"], row["sample_index"]))
            self.files.write_rollouts(step, rows)

    def evaluate_before_first_update(self, services: Services) -> None:
        """The held-out score that the run starts from; it stands in the first step's metrics."""
        if self.last_step == 0 and self.held_out:
            self._phase("evaluating the policy as it is")
            figures = self._evaluate(services)
            self._initial = {
                name.replace("eval/", "eval/initial_"): value for name, value in figures.items()
            }
            self.tell.message(f"before the first update: eval {figures['eval/score_mean']:+.3f}")

    def evaluate_when_due(self, step: int, services: Services) -> dict[str, float]:
        """The held-out score after a step that has an evaluation, else nothing."""
        is_due = step % self.config.eval.every == 0 or step == self.config.num_steps
        return self._evaluate(services) if is_due and self.held_out else {}

    def checkpoint_when_due(
        self, step: int, learner: Learner, metrics: dict[str, float]
    ) -> Checkpoint | None:
        """The whole state after a step that has a checkpoint, or when the driver wants to stop."""
        self.last_step = step
        self.interrupted = self.workers.broadcast(self.tell.stop_requested())
        if not (
            self.interrupted or self.config.checkpoint.is_due(step, last_step=self.config.num_steps)
        ):
            return None
        directory = Path(tempfile.mkdtemp(prefix="raypo-checkpoint-"))
        learner.save(directory)
        if self.workers.rank == 0:
            state = {
                "step": step,
                "stream": self.stream.state_dict(),
                "advantages": self.advantage_state.state_dict(),
                "metrics": self._initial | metrics,
                "wall_s": self._wall_s(),
            }
            (directory / "run.json").write_text(json.dumps(state))
        self._save_policy(learner)
        return Checkpoint.from_directory(str(directory))

    def report(
        self, step: int, metrics: dict[str, float], clock: Clock, checkpoint: Checkpoint | None
    ) -> None:
        """Hand the step to Ray Train, the files and the console."""
        metrics = self._initial | metrics
        self._initial = {}
        self.files.sync()  # the checkpoint counts once it is reported, so its rollouts go first
        ray.train.report({"step": step, **metrics, **clock.laps}, checkpoint=checkpoint)
        if checkpoint is not None:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        clock.lap("time/report_s")
        if self.workers.rank > 0:
            return
        step_s = time.perf_counter() - self._step_started
        metrics |= clock.laps | speed_figures(metrics, step_s)
        self.files.append_metrics(step, metrics)
        if self._board:
            self._board.write(step, metrics)
        self.files.sync()
        self.tell.step({"step": step, **metrics})

    def finish(self) -> dict[str, Any]:
        """Write the summary and say how it ended."""
        is_done = self.last_step == self.config.num_steps
        status = "finished" if is_done else "interrupted"
        if self.workers.rank == 0:
            self.files.write_summary(
                summarize(
                    self.files.metrics(),
                    status=status,
                    recipe="ppo",
                    wall_s=self._wall_s(),
                    versions=installed_versions(),
                )
            )
            self.files.sync()
        return {"status": status, "step": self.last_step}

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        if self._board:
            self._board.close()

    def _wall_s(self) -> float:
        return self._earlier_s + time.monotonic() - self._started

    def _phase(self, text: str) -> None:
        self.tell.phase(text)

    def _evaluate(self, services: Services) -> dict[str, float]:
        return evaluate_policy(
            self.held_out,
            services.engine,
            self.tokenizer,
            self.eval_function,
            section=self.config.eval,
            sampling=self.sampling,
            workers=self.workers,
        )

    def _restore(self, directory: Path, learner: Learner) -> None:
        learner.restore(directory)
        state = json.loads((directory / "run.json").read_text())
        self.stream.load_state_dict(state["stream"])
        self.advantage_state = self.advantage_state.restored(state["advantages"])
        self.last_step = state["step"]
        self._earlier_s = state["wall_s"]
        if self.workers.rank == 0:
            self.files.truncate(after_step=self.last_step)
            done = [row["step"] for row in self.files.metrics()]
            if self.last_step not in done:  # killed between the checkpoint and its line
                self.files.append_metrics(self.last_step, state["metrics"])

    def _save_policy(self, learner: Learner) -> None:
        """Replace the run's `policy/`; a whole one is there at every moment but one."""
        final = self.files.policy_dir
        new, old = final.with_name("policy.new"), final.with_name("policy.old")
        if self.workers.rank == 0:
            for left_over in (new, old):
                shutil.rmtree(left_over, ignore_errors=True)
        learner.save_policy(new, self.tokenizer)
        if self.workers.rank == 0:
            if final.exists():
                final.rename(old)
            new.rename(final)
            shutil.rmtree(old, ignore_errors=True)


def log_path(files: RunFiles, workers: Workers) -> Path:
    """Where a learner worker writes what libraries say."""
    return files.logs_dir / f"worker_{workers.rank}.log"


@contextmanager
def open_run(setup: dict[str, Any]) -> Iterator[Run]:
    """Everything that a worker needs before a model is loaded; wrong data ends the run here."""
    config, runtime = open_setup(setup)
    workers = Workers.current()
    files = RunFiles(runtime.storage_path, runtime.name)
    log_to_file(log_path(files, workers))
    torch.set_num_threads(config.learner.cpus_per_worker)
    run = _prepare(config, runtime, workers, files)
    try:
        yield run
    finally:
        run.close()


def _prepare(config: PPOConfig, runtime: Runtime, workers: Workers, files: RunFiles) -> Run:
    tell = Teller(runtime.monitor if workers.rank == 0 else None)
    tokenizer = load_tokenizer(config.model.policy)
    loaded = load_prompts(config.data, tokenizer)
    if loaded.num_skipped:
        tell.message(
            f"{loaded.num_skipped} of {loaded.num_skipped + len(loaded.prompts)} prompts are "
            f"longer than data.max_prompt_tokens ({config.data.max_prompt_tokens}) and skipped"
        )
    held_out: list[Prompt] = []
    if config.eval.prompts:
        section = config.data.model_copy(update={"prompts": config.eval.prompts})
        held_out = load_prompts(section, tokenizer, key="eval.prompts").prompts
    reward_function = runtime.reward_fn or load_function(config.reward.function or "")
    return Run(
        config=config,
        name=runtime.name,
        workers=workers,
        files=files,
        tell=tell,
        tokenizer=tokenizer,
        prompts=loaded.prompts,
        stream=PromptStream(loaded.prompts, seed=config.seed),
        held_out=held_out,
        reward_function=reward_function,
        eval_function=load_function(config.eval.function, key="eval.function")
        if config.eval.function
        else reward_function,
        sampling=Sampling.of(
            config.rollout,
            stop_token_ids=stop_token_ids(config.model.policy, tokenizer),
            seed=config.seed,
        ),
        advantage_state=AdvantageState.of(config.ppo.kl),
    )
