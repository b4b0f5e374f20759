"""PPOTrainer: a Ray Train TorchTrainer that checks, watches, resumes and stops a PPO run."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pandas as pd
import ray
import ray.train
from ray.actor import ActorHandle
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypo.checks import check_inputs, check_run_folder, is_finished
from raypo.cluster.connect import cluster_address, connect, dashboard_url
from raypo.cluster.monitor import start_monitor
from raypo.cluster.placement import Demand, alive_nodes, check_feasible
from raypo.config import PPOConfig
from raypo.config.paths import storage_path
from raypo.metrics.console import Console
from raypo.metrics.run_files import RunFiles
from raypo.metrics.summary import installed_versions, summarize
from raypo.recipes.ppo import train_loop_per_worker
from raypo.recipes.setup import RUNTIME_KEY, Runtime
from raypo.rewards.scoring import RewardFunction

POLL_S = 0.2
CONTROLLER_FAILURE_LIMIT = 2
"""Ray's own default retries a start that can never succeed for ever."""

RAY_RUN_NAME = "ray_train_run-"
"""How the names begin that RunConfig makes up."""


class PPOTrainer(TorchTrainer):
    """PPO on a language model: `PPOTrainer(PPOConfig.load("ppo.yaml")).fit()`.

    A `ray.train.torch.TorchTrainer` with the same arguments and the same Result. What Python
    passes wins over the config, and the resolved config records it.
    """

    def __init__(
        self,
        config: PPOConfig,
        *,
        reward_fn: RewardFunction | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **torch_trainer_arguments: Any,
    ) -> None:
        """Check the input and resolve the config; starts nothing.

        Args:
            config: The whole run file.
            reward_fn: (list[Rollout]) -> list[float]; wins over `reward.function`.
            scaling_config: Its `num_workers`, `use_gpu` and CPUs of `resources_per_worker` win
                over the `learner` section, its strategy over `placement.strategy`. Ray's default
                is `use_gpu=False`: pass True for GPUs, or leave the argument out.
            run_config: Its `name` and `storage_path` win over the config's.
            torch_trainer_arguments: Any other argument of TorchTrainer.

        Raises:
            ConfigError: a file, a key or a combination is wrong.
        """
        self.config = _resolve(config, reward_fn, scaling_config, run_config)
        check_inputs(self.config, has_reward_fn=reward_fn is not None)
        self._files = RunFiles(storage_path(self.config), self.config.name)
        self._reward_fn = reward_fn
        self._failure: BaseException | None = None
        super().__init__(
            train_loop_per_worker,
            train_loop_config=self.config.model_dump(),
            scaling_config=_scaling(self.config, scaling_config),
            run_config=_run_config(self.config, run_config),
            **torch_trainer_arguments,
        )

    def fit(self) -> Result:
        """Run, resume, or hand back the result of a run that is finished.

        Returns:
            Ray Train's Result; its `metrics_dataframe` has every step, `return_value["status"]`
            is finished or interrupted.

        Raises:
            ConfigError: the run folder belongs to another config, or the cluster is too small.
            ray.train.TrainingFailedError: a worker or Ray Train itself failed.
            KeyboardInterrupt: a second Ctrl-C or SIGTERM.
        """
        with self._files.lock():
            check_run_folder(self.config, self._files)
            if is_finished(self._files):
                return self._with_every_step(Result.from_path(self._run_path()))
            connected_here = connect(self.config.cluster)
            try:
                return self._with_every_step(self._fit_watched())
            finally:
                if connected_here:
                    ray.shutdown()

    def _fit_watched(self) -> Result:
        self._check_cluster()
        self._files.write_config(self.config.model_dump(mode="json"))
        self._files.sync()
        started = time.monotonic()
        monitor = start_monitor(self.config.name)
        runtime = Runtime(
            name=self.config.name,
            storage_path=storage_path(self.config),
            working_dir=os.getcwd(),
            monitor=monitor,
            reward_fn=self._reward_fn,
        )
        self.train_loop_config = {**self.config.model_dump(), RUNTIME_KEY: runtime}
        console = Console(config=self.config.model_dump())
        console.start(
            self.config.name,
            self.config.num_steps,
            dashboard_url(),
            self._files.location,
        )
        status = "failed"
        try:
            result = self._fit_in_thread(monitor, console)
            status = (result.return_value or {}).get("status", "failed")
            return result
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            if self._has_ended_without_a_summary(status):
                self._write_summary(status, time.monotonic() - started)
            console.close(status)
            ray.kill(monitor)

    def _fit_in_thread(self, monitor: ActorHandle, console: Console) -> Result:
        """Ray Train takes over Ctrl-C only in the main thread, so it gets another one."""
        outcome: list[Result | BaseException] = []

        def fit() -> None:
            try:
                outcome.append(TorchTrainer.fit(self))
            except BaseException as error:  # handed to the caller below
                outcome.append(error)

        thread = threading.Thread(target=fit, name="raypo-fit", daemon=True)
        with _stop_on_signal(monitor, console):
            thread.start()
            while thread.is_alive():
                thread.join(POLL_S)
                _show(console, monitor)
            _show(console, monitor)
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    def _check_cluster(self) -> None:
        learner = self.config.learner
        scaling = self.scaling_config
        bundle: dict[str, Any] = scaling._resources_per_worker_not_none
        check_feasible(
            Demand(
                role="learner workers (engine and frozen models share their bundles)",
                bundle={name: amount for name, amount in bundle.items() if amount},
                count=learner.num_workers,
                remedy="Lower learner.num_workers or learner.cpus_per_worker, or use a larger "
                "cluster.",
            ),
            alive_nodes(),
            strategy=self.config.placement.strategy,
        )

    def _run_path(self) -> str:
        return f"{storage_path(self.config).rstrip('/')}/{self.config.name}"

    def _with_every_step(self, result: Result) -> Result:
        rows = self._files.metrics()
        if result.return_value is None and is_finished(self._files):  # it was handed back
            steps = {"status": "finished", "step": self.config.num_steps}
            result = dataclasses.replace(result, return_value=steps)
        return dataclasses.replace(
            result,
            metrics=rows[-1] if rows else result.metrics,
            metrics_dataframe=pd.DataFrame(rows) if rows else result.metrics_dataframe,
        )

    def _has_ended_without_a_summary(self, status: str) -> bool:
        """The workers write it where they come to the loop's end."""
        return status == "failed" or (self._files.summary() or {}).get("status") != status

    def _write_summary(self, status: Literal["failed", "interrupted"], wall_s: float) -> None:
        self._files.write_summary(
            summarize(
                self._files.metrics(),
                status=status,
                recipe=self.config.recipe,
                wall_s=wall_s,
                versions=installed_versions(),
            )
        )
        self._files.sync()


def _resolve(
    config: PPOConfig,
    reward_fn: RewardFunction | None,
    scaling: ScalingConfig | None,
    run: RunConfig | None,
) -> PPOConfig:
    """The config with what Python passed recorded in it, checked once more as a whole."""
    values = config.model_dump()
    if scaling is not None:
        values["learner"]["num_workers"] = scaling.num_workers
        values["learner"]["use_gpu"] = scaling.use_gpu
        if scaling.placement_strategy != ScalingConfig().placement_strategy:
            values["placement"]["strategy"] = scaling.placement_strategy
        resources: Any = scaling.resources_per_worker or {}
        cpus = resources.get("CPU")
        values["learner"]["cpus_per_worker"] = int(cpus or values["learner"]["cpus_per_worker"])
    if run is not None:
        # Ray fills both in where the user says nothing.
        if not str(run.name).startswith(RAY_RUN_NAME):
            values["name"] = run.name
        if run.storage_path != RunConfig().storage_path:
            values["storage_path"] = run.storage_path
    if reward_fn is not None:
        module = getattr(reward_fn, "__module__", "__main__")
        name = getattr(reward_fn, "__qualname__", type(reward_fn).__name__)
        values["reward"]["function"] = f"{module}:{name}"
    return PPOConfig.parse(values, origin="PPOTrainer")


def _scaling(config: PPOConfig, given: ScalingConfig | None) -> ScalingConfig:
    """Ray's scaling config of the resolved config; what else the given one says stays."""
    learner = config.learner
    use_gpu = _cluster_has_gpus(config) if learner.use_gpu == "auto" else learner.use_gpu
    resources = {"CPU": float(learner.cpus_per_worker)} | ({"GPU": 1.0} if use_gpu else {})
    scaling = given or ScalingConfig(num_workers=learner.num_workers, use_gpu=use_gpu)
    return dataclasses.replace(
        scaling,
        resources_per_worker=scaling.resources_per_worker or resources,
        placement_strategy=config.placement.strategy,
    )


def _cluster_has_gpus(config: PPOConfig) -> bool:
    """Asks the cluster where there is one, else this machine, without starting anything."""
    if ray.is_initialized() or cluster_address(config.cluster)[0]:
        connect(config.cluster)
        return ray.cluster_resources().get("GPU", 0.0) > 0.0
    import torch

    return torch.cuda.is_available()


def _run_config(config: PPOConfig, given: RunConfig | None) -> RunConfig:
    run = given or RunConfig()
    changes: dict[str, Any] = {"name": config.name, "storage_path": storage_path(config)}
    if given is None or given.checkpoint_config in (None, CheckpointConfig()):
        changes["checkpoint_config"] = CheckpointConfig(num_to_keep=config.checkpoint.keep)
    failure = run.failure_config or FailureConfig()
    if failure.controller_failure_limit < 0:
        changes["failure_config"] = dataclasses.replace(
            failure, controller_failure_limit=CONTROLLER_FAILURE_LIMIT
        )
    return dataclasses.replace(run, **changes)


def _show(console: Console, monitor: ActorHandle) -> None:
    for kind, content in ray.get(monitor.drain.remote()):
        if kind == "step":
            console.step(content)
        elif kind == "start":
            console.resume(content)
        elif kind == "phase":
            console.phase(content)
        elif kind == "message":
            console.message(content)


@contextmanager
def _stop_on_signal(monitor: ActorHandle, console: Console) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends the run after its step, the second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def stop(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        monitor.request_stop.remote()
        console.message("Stopping after this step, with a checkpoint; once more to stop at once.")

    earlier = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
