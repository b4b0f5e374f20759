"""A Ray Train TorchTrainer that checks, monitors, resumes and stops a run of any recipe.

Threads: Ray Train runs in a thread of its own (`_fit_in_thread`). The main thread handles signals,
and polls the monitor actor for the workers' events until that thread's future is done.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import pandas as pd
import ray
import ray.train
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train import (
    ControllerError,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
)
from ray.train.torch import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raypo.checks.input_checks import check_disk, check_inputs
from raypo.checks.model_checks import check_kernels, check_models
from raypo.checks.resume_checks import (
    check_fresh_start,
    check_run_folder,
    finished_message,
    is_finished,
)
from raypo.checks.row_checks import with_steps_of_epochs
from raypo.cluster.connect import (
    connect,
    dashboard_token,
    dashboard_url,
    missing_environment,
)
from raypo.cluster.placement import PlacementError, lay_out, worker_bundles
from raypo.cluster.placement_group_gc import start_placement_group_gc
from raypo.cluster.resources import alive_nodes
from raypo.cluster.run_monitor import start_monitor
from raypo.cluster.torch_config import CheckedTorchConfig
from raypo.concurrency import daemon_future
from raypo.config import ConfigError, OnlineConfig, RecipeConfig
from raypo.config.paths import is_uri
from raypo.deployment.reserve import Dedicated, reserve
from raypo.inputs import record_inputs
from raypo.plan.fit import decide_for_gpus
from raypo.ray_internals import (
    detect_nccl_hangs,
    has_autoscaler,
    is_driver,
    remove_callbacks,
    without_worker_output,
)
from raypo.report.verdict import learned
from raypo.rewards.scoring import RewardFunction
from raypo.run.callbacks import StepView
from raypo.run.setup import RUNTIME_KEY, Runtime
from raypo.storage.checkpoints import has_begun, mend_list
from raypo.storage.retries import StorageError
from raypo.storage.run_files import GIVEN_MODELS, GIVEN_ROWS, RunFiles, close_files
from raypo.storage.summary import installed_versions, recount, summarize
from raypo.tracking.console import Console
from raypo.trainer.arguments import Arguments, TrainerInput, read_arguments, with_models
from raypo.trainer.given_rows import Rows, with_rows
from raypo.trainer.settings import (
    check_arguments,
    check_not_started_by_import,
    resolve,
    run_config_of,
    scaling_of,
)
from raypo.trainer.watch import (
    PrintingCallback,
    advice,
    failures_left,
    is_lost_controller,
    show_events,
    stop_on_signal,
    with_user_frames,
)
from raypo.trainer.watchdog import Watchdog

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)

_QUIET = ("ray", "raypo")
"""Packages whose Ray Train callbacks print nothing for the user."""
POLL_S = 0.2
"""Interval at which the driver polls the monitor for events."""
_HUGGING_FACE_METHODS = {
    "train": "Call fit(): it starts or resumes the run, and returns Ray Train's Result.",
    "save_model": "A run saves the model itself: its folder has policy/.",
    "save_pretrained": "A run saves the model itself: its folder has policy/.",
    "push_to_hub": "Upload the folder policy/ of the run: `hf upload NAME runs/.../policy`.",
    "evaluate": "Set eval.prompts, or call `raypo eval` with the run's folder.",
    "add_callback": "Give callbacks=[function] to the trainer.",
}
"""Alternatives to the methods of Hugging Face's trainers, by method."""


class RecipeTrainer(TorchTrainer, Generic[AnyConfig]):
    """Trainer of a recipe: a `ray.train.torch.TorchTrainer` with the same arguments and Result.

    Python arguments take precedence over the config, and are recorded in the resolved config.
    """

    config_class: ClassVar[type[RecipeConfig]]
    """Config class of the recipe."""
    preset: ClassVar[str | None] = None
    """Value of `ppo.preset` if the config sets neither `ppo.preset` nor `ppo.advantage`."""

    def __init__(  # noqa: PLR0913 - the names that Hugging Face and Ray users know
        self,
        config: AnyConfig | Mapping[str, Any] | str | Path | None = None,
        *positional: Any,
        model: Any = None,
        args: Any = None,
        train_dataset: Rows | str | Path | None = None,
        eval_dataset: Rows | str | Path | None = None,
        reward_funcs: Any = None,
        reward_weights: Sequence[float] | None = None,
        processing_class: Any = None,
        peft_config: Any = None,
        ref_model: Any = None,
        callbacks: Sequence[Callable[[StepView], Any] | str] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Rows] | None = None,
        fresh: bool = False,
        notes: Sequence[str] | None = None,
        **torch_trainer_arguments: Any,
    ) -> None:
        """Check the input and resolve the config, without starting anything.

        Args:
            config: The whole run config, a mapping of its keys (nested, or dotted like
                `{"learner.policy_lr": 1e-6}`), or the path of a run file. The arguments from
                `model` to `callbacks` also set config keys, and are enough without a config.
            positional: Other positional arguments are refused.
            model: `model.policy`: a folder or hub id, or a transformers model, which is saved into
                the run's folder together with `processing_class`.
            args: Alternative name of `config`, or a config object of TRL: GRPOConfig, SFTConfig,
                DPOConfig or RewardConfig. Keys of a mapping in `config` take precedence over its
                fields; `fit` prints how each field was translated.
            train_dataset: `data.prompts`: a path or hub id, or rows as in `datasets`.
            eval_dataset: `eval.prompts` (for DPO `eval.pairs`), like `train_dataset`.
            reward_funcs: For recipes that sample: one or several reward functions, whose scores are
                added. They replace `reward.function`. Each is a function or callable object
                (list[Rollout]) -> list[float], a function f(prompts, completions,
                **columns) as in TRL, a compute_score(data_source, solution_str, ground_truth,
                extra_info) as in verl, an import path `file.py:name`, or the folder or hub id of a
                reward model.
            reward_weights: A factor for each of `reward_funcs`. None means 1 each.
            processing_class: The model's tokenizer. A model given as an object needs it. For other
                models the run loads the tokenizer from the model's folder.
            peft_config: `model.lora`: peft's LoraConfig, or a mapping of the keys of `model.lora`.
            ref_model: `model.reference`, like `model`.
            callbacks: Functions that are called with a `StepView` after each step, or import paths
                `file.py:name`.
            scaling_config: Ray's ScalingConfig. `num_workers` (a number, or the lowest and the
                highest number), `use_gpu` and the CPUs of `resources_per_worker` override the
                `learner` section, and `placement_strategy` overrides `placement.strategy`.
                `label_selector` and `accelerator_type` override `placement.label_selector`. Ray's
                default is `use_gpu=False`: pass True for GPUs, or leave the argument out.
            run_config: Ray's RunConfig. `name`, `storage_path`, `failure_config` (`max_failures`)
                and `checkpoint_config` override keys of the config: `num_to_keep` overrides
                `checkpoint.keep`, and `checkpoint_score_attribute` and `checkpoint_score_order`
                override `checkpoint.best_by` and `best_mode`. Values equal to Ray's defaults count
                as not set.
            datasets: `{"train": rows, "eval": rows}`, as in Ray Train: a `ray.data.Dataset`, a
                `datasets.Dataset` or a list of dicts, for `data.prompts` and `eval.prompts` (for
                DPO `eval.pairs`). Other config keys are given by their names, like
                `{"eval.prompts": rows}`. The rows are written into the run's folder one by one, and
                the resolved config names the files. A Ray Data set is executed once for that.
            fresh: Whether `fit` removes an existing run and starts over.
            notes: Notes of `raypo.checks.input_checks.check_inputs` on this config, from a caller
                that has just checked it. None means to check it here.
            torch_trainer_arguments: Only `torch_config` is accepted. Other arguments of
                TorchTrainer are refused, because they would have no effect.

        Raises:
            ConfigError: a file, a key, an argument or a combination is wrong.
        """
        check_not_started_by_import()
        config_class: Any = type(self).config_class
        if positional:
            raise ConfigError(
                f"{type(self).__name__} ({1 + len(positional)} positional arguments): only the "
                "config may be positional. Write model=..., reward_funcs=..., args=..., "
                "train_dataset=..."
            )
        check_arguments(scaling_config, run_config, torch_trainer_arguments)
        arguments = Arguments(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_funcs=reward_funcs,
            reward_weights=reward_weights,
            processing_class=processing_class,
            peft_config=peft_config,
            ref_model=ref_model,
            callbacks=callbacks,
            datasets=datasets,
        )
        trainer_input: TrainerInput[Any] = read_arguments(
            config_class, config, arguments, preset=type(self).preset
        )
        self._input, self._fresh, self._notes = trainer_input, fresh, notes
        self._reward_fn = trainer_input.reward_fn
        self.arguments_of_trials: dict[str, Any] = {
            "reward_funcs": trainer_input.reward_fn,
            "callbacks": trainer_input.callbacks,
            "scaling_config": scaling_config,
            **torch_trainer_arguments,
        }
        """Arguments of the trainers of a `Tuner`'s trials: the Python objects that they share."""
        resolved_config: Any = resolve(
            trainer_input.config, scaling_config, run_config, self._reward_fn
        )
        checked_config = self._checked(resolved_config)
        with self._without_leftovers():
            scaling = scaling_of(checked_config, scaling_config)
            if not scaling.use_gpu:
                check_kernels(checked_config)
        self.config: AnyConfig = checked_config.with_dtype(use_gpu=bool(scaling.use_gpu))
        self._files = RunFiles(self.config.storage_path, self.config.name)
        self._group_gc: ActorHandle | None = None
        torch_config = torch_trainer_arguments.get("torch_config")
        torch_trainer_arguments["torch_config"] = CheckedTorchConfig.of(torch_config)
        super().__init__(
            _loop(self.config.recipe),
            train_loop_config=self.config.model_dump(),
            scaling_config=scaling,
            run_config=self._run_config(run_config),
            **torch_trainer_arguments,
        )

    if not TYPE_CHECKING:  # a type checker reports unknown attributes by itself

        def __getattr__(self, name: str) -> Any:
            """Refuse methods of Hugging Face's trainers, and name their counterparts."""
            remedy = _HUGGING_FACE_METHODS.get(name, "There is no such attribute.")
            raise AttributeError(f"{type(self).__name__}.{name}: {remedy}", name=name, obj=self)

    def fit(self) -> Result:
        """Run or resume training, or return the result of a finished run.

        Returns:
            Ray Train's Result. Its `metrics_dataframe` has every step; `return_value["status"]` is
            finished or interrupted.

        Raises:
            ConfigError: the run folder belongs to another config, or the cluster is too small.
            ray.train.TrainingFailedError: workers or Ray Train itself failed more often than
                `max_failures` allows.
            KeyboardInterrupt: a second Ctrl-C or SIGTERM.
        """
        self._files.check_writable()
        with self._files.lock():
            self._check_folder()
            if not self._fresh and is_finished(self._files, self.config):
                Console().message(finished_message(self._files, self.config, fresh="fresh=True"))
                return self._with_every_step(Result.from_path(self._files.location))
            with self._without_leftovers():
                if self._fresh:  # another trainer of this run may have removed the written files
                    self.config = self._with_given(self.config)
                config: Any = self.config
                check_disk(config)
                check_models(config)
            if self._input.report:
                Console().message("\n".join(self._input.report))
            if self._input.is_built:
                Console().message(f"{self._title_of_config()}:\n\n{config.to_yaml()}")
            for note in self._notes or ():
                Console().message(f"Note: {note}.")
            owns_connection = connect(self.config.cluster)
            try:
                with without_worker_output():
                    return self._with_every_step(self._fit_watched())
            except WorkerGroupError as error:
                raise with_user_frames(error) from None
            finally:
                if owns_connection:
                    ray.shutdown()
                recount(self._files)
                close_files(self._files)

    def _title_of_config(self) -> str:
        """Return the headline of the printed config. A run file cannot hold Python functions."""
        if self._reward_fn is None and not self._input.callbacks:
            return "The config, as a run file"
        return (
            "The config. It is only a record, because it contains functions of this script by "
            "name: only this script can start the run"
        )

    def _checked(self, config: Any) -> AnyConfig:
        """Write the Python inputs to files, check all inputs, and set the number of steps."""
        with self._without_leftovers():
            config = self._with_given(config)
            if self._notes is None:
                self._notes = check_inputs(config, reward_fn=self._reward_fn)
            return with_steps_of_epochs(config)

    def _with_given(self, config: AnyConfig) -> AnyConfig:
        """Write rows and models given in Python into the run's folder.

        Return the config that names their files.
        """
        earlier_files = _files_given_in_python(config)
        try:
            if (self._input.rows or self._input.models) and not is_uri(config.storage_path):
                RunFiles(config.storage_path, config.name).check_writable()
            return with_models(with_rows(config, self._input.rows), self._input.models)
        finally:
            self._written = _files_given_in_python(config) - earlier_files

    @contextmanager
    def _without_leftovers(self) -> Iterator[None]:
        """If the run is refused, remove the rows and models that this trainer wrote.

        Files that existed before are kept, because another trainer of the same run may need them.
        """
        try:
            yield
        except ConfigError:
            for path in sorted(self._written, reverse=True):  # files before their folders
                with suppress(OSError):  # the folder has other files
                    path.rmdir() if path.is_dir() else path.unlink()
            raise

    def _fit_watched(self) -> Result:
        self._check_cluster()
        # Each of these callbacks starts a process that imports ray.train, which takes seconds on a
        # small machine. They are not needed: no worker reads Ray Data, and `self._group_gc` removes
        # the placement groups of a run that was killed.
        remove_callbacks(self, {"DatasetsCallback", "PlacementGroupCleanerCallback"})
        self._tell_workers()
        if self._fresh:  # not before: a start that fails until here leaves the earlier run intact
            self._files.remove(self.config.model_dump(mode="json"))
        self._files.write_config(self.config.model_dump(mode="json"))
        accepted_changes = record_inputs(
            self.config,
            self._files,
            resumes=has_begun(self._files),
            given=self.given_functions,
        )
        self._files.sync()
        earlier_s = (self._files.summary() or {}).get("wall_s", 0.0)
        started_at = time.monotonic()
        counted_from = started_at - earlier_s
        monitor = start_monitor(self.config.name)
        self._show_prints_of_callbacks(monitor)
        if self._use_gpu and self.config.learner.num_workers != 1:
            detect_nccl_hangs(
                self,
                partial(monitor.tell.remote, "message"),
                confirm_s=(self.config.hang_limit_s or 1200.0) / 2,
            )
        self._group_gc = self._start_group_gc(monitor)
        console = Console(config=self.config.model_dump())
        dedicated = Dedicated()
        status = "failed"
        try:
            console.start(
                self.config.name,
                self.config.num_steps,
                dashboard_url(),
                self._files.location,
                dashboard_token(),
                self._files.metrics(),
            )
            if repair_note := self._mend_list():
                console.message(repair_note)
            for change in accepted_changes:
                console.message(f"changed input, accepted: {change}")
            dedicated = self._start_dedicated(monitor, console.message)
            self._wait_for_room(monitor, console.message)
            self.train_loop_config = {
                **self.config.model_dump(),
                RUNTIME_KEY: self._runtime(monitor, dedicated),
            }
            result = self._fit_in_thread(monitor, console, started_at=started_at)
            status = (result.return_value or {}).get("status", "failed")
            return result
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            if status == "failed":  # an incomplete checkpoint would keep a full disk full
                self._files.clear_stages()
            self._write_summary(status, time.monotonic() - counted_from)
            verdict = learned(self._files) if status == "finished" else ""
            console.close(status, (self._files.summary() or {}).get("wall_s"), verdict)
            ray.kill(monitor)
            dedicated.shutdown(graceful=status == "finished")

    def _tell_workers(self) -> None:
        """Pass to the workers the environment variables that the Ray job does not set.

        The user's `worker_runtime_env` takes precedence.
        """
        if variables := missing_environment():
            runtime_env = dict(self.run_config.worker_runtime_env or {})
            runtime_env["env_vars"] = {**variables, **runtime_env.get("env_vars", {})}
            self.run_config.worker_runtime_env = runtime_env

    def _show_prints_of_callbacks(self, monitor: ActorHandle) -> None:
        callbacks = [
            PrintingCallback(callback, monitor)
            if isinstance(callback, UserCallback)
            and type(callback).__module__.split(".")[0] not in _QUIET
            else callback
            for callback in self.run_config.callbacks or ()
        ]
        self.run_config = dataclasses.replace(self.run_config, callbacks=callbacks)

    def _start_group_gc(self, monitor: ActorHandle) -> ActorHandle | None:
        # Ray removes placement groups only when the job's driver ends. A task or an actor, like a
        # trial of Ray Tune, needs a collector, because its job may outlive it.
        return None if is_driver() else start_placement_group_gc(run_lease=monitor)

    def _check_folder(self) -> None:
        if self._fresh:
            check_fresh_start(self.config, self._files)
            return
        functions = self.given_functions
        check_run_folder(self.config, self._files, start_over="fresh=True", given=functions)

    @property
    def given_functions(self) -> dict[str, RewardFunction]:
        """Functions that were passed in Python, by config key."""
        return {} if self._reward_fn is None else {"reward.function": self._reward_fn}

    def _mend_list(self) -> str | None:
        """Call `mend_list` for Ray Train's folder, which in pbt is the folder of a segment."""
        run: Any = self.run_config
        return mend_list(RunFiles(run.storage_path, run.name))

    def _run_config(self, run_config: RunConfig | None) -> RunConfig:
        return run_config_of(self.config, run_config)

    def _runtime(self, monitor: ActorHandle, dedicated: Dedicated) -> Runtime:
        return Runtime(
            name=self.config.name,
            storage_path=self.config.absolute_storage_path,
            working_dir=os.getcwd(),
            monitor=monitor,
            group_gc=self._group_gc,
            reward_fn=self._reward_fn,
            callbacks=self._input.callbacks,
            decide=decide_for_gpus,
            dedicated=dedicated.handles,
        )

    def _fit_in_thread(
        self, monitor: ActorHandle, console: Console, *, started_at: float
    ) -> Result:
        """Run Ray Train in a thread and show the workers' events until it ends.

        Args:
            monitor: The run's monitor.
            console: Console for the events.
            started_at: Time from which `stop.after_s` counts, on the monotonic clock.
        """
        after_s = self.config.stop.after_s
        deadline = math.inf if after_s is None else started_at + after_s

        def stop() -> None:
            monitor.request_stop.remote()
            console.message(
                "Stopping after this step, with a checkpoint; interrupt again to stop immediately."
            )

        watchdog = Watchdog(
            self.config.hang_limit_s,
            self.config.max_failures,
            self._files,
            console.message,
        )
        with stop_on_signal(stop):
            # Ray Train overrides the handler of Ctrl-C, but only in the main thread.
            outcome = daemon_future(lambda: self._fit_under_controllers(monitor), name="raypo-fit")
            while not outcome.done():
                wait([outcome], timeout=POLL_S)
                show_events(console, monitor, watchdog)
                watchdog.look()
                if self._is_unwanted():
                    monitor.request_stop.remote()
                if time.monotonic() > deadline:
                    monitor.request_stop.remote()
                    deadline = math.inf
                    console.message(
                        f"{after_s:g} s have passed (stop.after_s): stopping after this step, "
                        "with a checkpoint; the same command resumes the run."
                    )
            show_events(console, monitor, watchdog)
            try:
                return outcome.result()
            except (WorkerGroupError, ControllerError) as error:
                raise watchdog.explained(error) from None

    def _fit_under_controllers(self, monitor: ActorHandle) -> Result:
        """Run TorchTrainer.fit, and run it again with a new controller if its controller is lost.

        Ray counts lost workers in the controller; only the driver can count lost controllers.
        """
        self._allow_failures(self.config.max_failures)
        while True:
            try:
                result = TorchTrainer.fit(self)
                if (reason := (result.return_value or {}).get("reason")) is not None:
                    raise WorkerGroupError(reason, {})
                return result
            except RayError as error:
                if not is_lost_controller(error):
                    raise
                attempts, group = ray.get(monitor.end_attempt.remote())
                if group is not None:  # everything else that the workers hold ends with them
                    remove_placement_group(group)
                remaining_failures = failures_left(self.config.max_failures, attempts)
                if group is None or remaining_failures is None:
                    failure = ControllerError(error)
                    failure.add_note(advice(self.config.max_failures))
                    raise failure from None
            monitor.tell.remote(
                "message",
                "Ray Train's controller was lost; the run resumes from its last checkpoint.",
            )
            self._wait_for_room(monitor, partial(monitor.tell.remote, "message"))
            self._allow_failures(remaining_failures)

    def _allow_failures(self, count: int) -> None:
        failure_config = self.run_config.failure_config or FailureConfig()
        allowed = dataclasses.replace(failure_config, max_failures=count)
        self.run_config = dataclasses.replace(self.run_config, failure_config=allowed)

    def _is_unwanted(self) -> bool:
        """Return True if a sweep has requested the run's end after the current step."""
        return False

    def _check_cluster(self) -> None:
        """Refuse a run that the cluster can never place; Ray itself would wait forever.

        An autoscaler may add nodes. In such a cluster the reservation waits for them.
        """
        nodes = alive_nodes()
        try:
            lay_out(
                self._recipe,
                nodes,
                use_gpu=self._use_gpu,
                resources_per_worker=self.worker_resources,
            )
        except PlacementError:
            if not has_autoscaler():
                raise
            Console().message(
                f"The nodes that the cluster has now ({len(nodes)}) have no room for this run. "
                "The run waits until Ray's autoscaler has added nodes, up to "
                f"{self.config.placement.timeout_s:g} s (placement.timeout_s)."
            )

    def _wait_for_room(self, monitor: ActorHandle, say: Callable[[str], object]) -> None:
        """Wait until there is room for the learner workers' placement group.

        This reserves a group with the same bundles and removes it again, before Ray Train creates
        its own group. Unlike Ray Train, it reports which bundle waits for which resources.
        """
        group = reserve(
            worker_bundles(
                self._recipe, use_gpu=self._use_gpu, resources_per_worker=self.worker_resources
            ),
            "the learner workers' group",
            name=f"raypo:{self.config.name}:workers",
            placement=self.config.placement,
            on_requested=lambda group: self._hold(monitor, group),
            notify=say,
        )
        remove_placement_group(group)

    @property
    def _recipe(self) -> Any:
        """Config with the lowest number of workers, typed as Any to suit every recipe."""
        config: Any = self.config
        min_workers = config.learner.min_workers
        return config if min_workers is None else config.with_workers(min_workers)

    @property
    def worker_resources(self) -> dict[str, float]:
        """Resources of a learner worker, including custom resources of the scaling config."""
        scaling = self.scaling_config
        resources: dict[str, Any] = {
            "CPU": scaling.num_cpus_per_worker,
            "GPU": scaling.num_gpus_per_worker,
            **scaling.additional_resources_per_worker,
        }
        return {name: amount for name, amount in resources.items() if amount}

    def _start_dedicated(self, monitor: ActorHandle, say: Callable[[str], object]) -> Dedicated:
        """Start the dedicated deployments, before the workers start.

        The deployments survive restarts of the workers.
        """
        if not isinstance(self.config, OnlineConfig) or not self.config.placement.is_dedicated:
            return Dedicated()
        from raypo.run.dedicated_services import start_dedicated  # imports model code

        return start_dedicated(
            self.config.with_absolute_paths(os.getcwd()),
            self.config.name,
            logs_dir=str(self._files.logs_dir),
            use_gpu=self._use_gpu,
            on_requested=lambda group: self._hold(monitor, group),
            notify=say,
        )

    def _hold(self, monitor: ActorHandle, group: PlacementGroup) -> None:
        """Register a group with the collector, which removes it if this process is killed."""
        if self._group_gc is not None:
            ray.get(self._group_gc.hold.remote(monitor, group))

    @property
    def _use_gpu(self) -> bool:
        return bool(self.scaling_config.use_gpu)

    def _with_every_step(self, result: Result) -> Result:
        rows = self._files.metrics()
        # A result that was read back from the folder of a finished run has no return value.
        if result.return_value is None and is_finished(self._files, self.config):
            steps = {"status": "finished", "step": self._files.last_step()}
            result = dataclasses.replace(result, return_value=steps)
        return dataclasses.replace(
            result,
            metrics=rows[-1] if rows else result.metrics,
            metrics_dataframe=pd.DataFrame(rows) if rows else result.metrics_dataframe,
        )

    def _write_summary(self, status: Literal["failed", "interrupted"], wall_s: float) -> None:
        """Write the run's summary, unless the workers wrote it at the end of their train loop.

        If this fails, it is reported but not raised: it would hide the error that ended the run.
        """
        try:
            if status != "failed" and (self._files.summary() or {}).get("status") == status:
                return
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
        except (OSError, StorageError) as error:
            Console().message(f"warning: summary.json could not be written: {error}")


def _files_given_in_python(config: RecipeConfig) -> set[Path]:
    """Return the run's local folder, and the files of given rows and models below it."""
    if is_uri(config.storage_path):
        return set()
    folder = Path(config.absolute_storage_path, config.name)
    folders = [folder / GIVEN_ROWS, folder / GIVEN_MODELS]
    paths = [folder, *folders, *(path for root in folders for path in root.rglob("*"))]
    return {path for path in paths if path.exists()}


def _loop(recipe: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a recipe's train loop, which is imported only when it runs.

    A driver that does not import model code starts in two thirds of the time.
    """

    def loop(setup: dict[str, Any]) -> dict[str, Any]:
        # An attempt cannot replace a dedicated role: it ends the run before it loads models. The
        # checks run beside the import, because a replica that is starting does not answer.
        handles = [*setup[RUNTIME_KEY].dedicated.values()]
        checks = [daemon_future(handle.is_lost, name="raypo-is-lost") for handle in handles]
        module = import_module(f"raypo.recipes.{recipe}")
        for handle, is_lost in zip(handles, checks, strict=True):
            if is_lost.result():
                return {"status": "failed", "reason": str(handle.lost_error())}
        return module.train_loop_per_worker(setup)

    return loop
