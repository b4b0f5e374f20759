"""All uses of Ray's private APIs. No other module uses them.

`tests/unit/test_ray_internals.py` fails if a new version of Ray changes one of them. Ray is
imported inside functions, so that code that only reads a run's files does not import it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray.actor import ActorHandle
    from ray.train import Result
    from ray.train.torch import TorchTrainer
    from ray.tune import ResultGrid, ResumeConfig, Tuner
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import TrialScheduler

CHECKPOINTS = "checkpoint_manager_snapshot.json"
"""File in which Ray Train lists a run's checkpoints. Unlisted checkpoints are incomplete."""
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable with which `ray job submit` passes its runtime environment to the driver."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""gRPC method to which a Ray head node replies if the client's token is valid."""


def address_file() -> Path:
    """Return the file to which `ray start` writes the address of this machine's Ray."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def reload_environment() -> None:
    """Make Ray's core read the environment variables again, as it did on import."""
    from ray import _raylet

    core: Any = _raylet
    core.Config.initialize("")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started in this context listen on the loopback interface only.

    Ray does so on macOS and Windows. Elsewhere its ports, which can run code, are open to the
    network, and `ray.init` has no argument against it.

    Ray's processes inherit the environment variable of the same meaning, and so do their children:
    without it, a program that joins this Ray would look for it at the machine's address in the
    network.
    """
    from ray._private import ray_constants

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, variable = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(name)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        if variable is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = variable


def readiness(actor: ActorHandle) -> Any:
    """Return an object reference that becomes ready when the actor can reply to calls."""
    ping: Any = actor.__ray_ready__  # pyright: ignore[reportAttributeAccessIssue]
    return ping.remote()


def cause_of(error: BaseException) -> BaseException:
    """Return the exception of a Ray Train worker, unwrapped from Ray Train's exception."""
    return getattr(error, "_base_exc", error)


@dataclass(frozen=True)
class ActorProcess:
    """The process of an actor that is alive."""

    actor_id: str
    name: str
    """Name of the actor, or of its class if it has none."""
    node_id: str
    pid: int


def actors_of_this_job() -> list[ActorProcess]:
    """Return the processes of all living actors of this process's job."""
    import ray
    from ray._private.state import state

    job_id = ray.get_runtime_context().get_job_id()
    table = state.actor_table(None, ray.JobID.from_hex(job_id), "ALIVE")
    return [
        ActorProcess(
            actor_id,
            actor["Name"] or actor["ActorClassName"],
            actor["Address"]["NodeID"],
            actor["Pid"],
        )
        for actor_id, actor in table.items()
    ]


def failed_to_start(error: BaseException) -> bool:
    """Return True if an actor was lost because its constructor raised an exception."""
    return bool(getattr(error, "actor_init_failed", False))


def run_storage(storage: Any) -> tuple[FileSystem, str]:
    """Return the file system and the folder path in which Ray Train stores runs.

    Args:
        storage: `ray.train.get_context().get_storage()`.
    """
    return storage.storage_filesystem, storage.storage_fs_path


def checkpoint_folder(storage: Any, name: str) -> str:
    """Return the path of a Ray Train checkpoint on the run's file system."""
    return storage.build_checkpoint_path_from_name(name)


def checkpoint_list(checkpoints: Iterable[tuple[str, Mapping[str, Any]]]) -> bytes:
    """Return the content of the file `CHECKPOINTS` for these checkpoints.

    The checkpoint with the highest step is listed as the latest.

    Args:
        checkpoints: Folder name and reported metrics (with `step`) of each checkpoint, in ascending
            order of score.
    """
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
        _CheckpointManagerState,
        _TrainingResultState,
    )

    results = [
        _TrainingResultState(checkpoint_dir_name=name, metrics=dict(metrics))
        for name, metrics in checkpoints
    ]
    by_step = sorted(results, key=lambda result: result.metrics["step"])
    state = _CheckpointManagerState(
        checkpoint_results=results,
        checkpoint_report_indices=[by_step.index(result) for result in results],
        latest_checkpoint_result=by_step[-1],
        pending_training_results=[],
        pending_validation_specs=[],
        current_report_index=len(results),
        validated_checkpoint_dir_names=[],
        timed_out_validation_checkpoint_dir_names=[],
        failed_validation_checkpoint_dir_names=[],
    )
    return state.json().encode()


def check_shared(storage: Any) -> None:
    """Run Ray Train's check that this node can see the files in the run's folder.

    Raises:
        RuntimeError: this node cannot see the files.
    """
    storage._check_validation_file()


@contextmanager
def without_worker_output() -> Iterator[None]:
    """Suppress the output of Ray's workers in this process, like `log_to_driver=False`.

    If the user called `ray.init()`, Ray would otherwise print each line of their output.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    handlers, dispatcher.handlers = dispatcher.handlers, []
    try:
        yield
    finally:
        dispatcher.handlers = handlers


def remove_callbacks(trainer: TorchTrainer, names: Iterable[str]) -> None:
    """Remove default callbacks with these class names from Ray Train's controller."""
    create_callbacks = trainer._create_default_callbacks

    def create_remaining_callbacks() -> list[Any]:
        return [callback for callback in create_callbacks() if type(callback).__name__ not in names]

    trainer._create_default_callbacks = create_remaining_callbacks


def detect_nccl_hangs(
    trainer: TorchTrainer, tell: Callable[[str], object], *, confirm_s: float
) -> None:
    """Add Ray Train's detector of NCCL hangs to a trainer, and pass on its words.

    Ray would only log them, in its controller. The detector observes: it names the ranks that lag,
    and writes their stacks to `hang_detector/` in the run's folder. Variables of the user
    (RAY_TRAIN_ENABLE_NCCL_HANG_DETECTOR=0, RAY_TRAIN_NCCL_RAS_*) take precedence.

    Args:
        trainer: The trainer.
        tell: Callback for a message. It is pickled.
        confirm_s: Seconds without progress after which the detector reports a hang.
    """
    from ray.train.v2._internal.callbacks.nccl_ras import NCCLRASCallback
    from ray.train.v2._internal.constants import (
        ENABLE_NCCL_HANG_DETECTOR_ENV_VAR,
        NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR,
    )

    if os.environ.get(ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, "").lower() in ("0", "false"):
        return

    class ToConsole(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            # NCCL's wheels lack the program `ncclras`, so most runs go without the detector.
            if not record.getMessage().startswith("`ncclras`"):
                tell(f"Ray Train: {record.getMessage()}")

    class Detector(NCCLRASCallback):
        def after_worker_group_start(self, worker_group: Any) -> None:
            logger = logging.getLogger(NCCLRASCallback.__module__)
            if not any(type(handler).__name__ == "ToConsole" for handler in logger.handlers):
                logger.addHandler(ToConsole(logging.WARNING))
            super().after_worker_group_start(worker_group)

    create_callbacks = trainer._create_default_callbacks

    def create_with_detector() -> list[Any]:
        others = [call for call in create_callbacks() if not isinstance(call, NCCLRASCallback)]
        is_default = NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR not in os.environ
        os.environ.setdefault(NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR, str(confirm_s))
        try:
            return [*others, Detector()]
        finally:
            if is_default:
                del os.environ[NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR]

    trainer._create_default_callbacks = create_with_detector


def run_controllers_in_process(trainer: TorchTrainer) -> None:
    """Run Ray Train's controller in the trainer's process. Ray would otherwise start an actor."""
    from ray.train.v2._internal.execution.controller import TrainController

    def run(**arguments: Any) -> Result:
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()

    trainer._initialize_and_run_controller = run


def dashboard_address() -> str | None:
    """Return the address of the connected cluster's dashboard, or None if it has none.

    `ray.init().dashboard_url` is correct only in drivers. In a worker, such as a Ray Tune trial, it
    always has the default port, even if the dashboard uses another port (Ray 2.60).
    """
    from ray._private.services import get_webui_url_from_internal_kv

    if override := os.environ.get("RAY_OVERRIDE_DASHBOARD_URL"):
        return override
    return get_webui_url_from_internal_kv() or None


def has_autoscaler() -> bool:
    """Return whether the connected cluster has an autoscaler that can add nodes.

    Every Ray cluster runs an autoscaler process. Without an autoscaler config, this process only
    reports the nodes.
    """
    import ray
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.autoscaler._private.util import format_readonly_node_type
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):  # v2 knows each node's cloud instance id
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return any(n.instance_id for n in [*status.active_nodes, *status.idle_nodes])
    # v1 gets the names of node types from its config. Without a config, it derives the names from
    # node ids.
    report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
    summary = report.get("autoscaler_report") or {}
    node_types = {*summary.get("active_nodes", ()), *(summary.get("idle_nodes") or ())}
    inactive_nodes = [*summary.get("pending_nodes", ()), *summary.get("failed_nodes", ())]
    node_types |= {node_type for _, node_type, *_ in inactive_nodes}
    return not node_types <= {format_readonly_node_type(node["NodeID"]) for node in ray.nodes()}


def is_driver() -> bool:
    """Return True if this process is the driver of the Ray job, not a task or actor."""
    import ray

    # Without a connection, Ray's context would start a local Ray.
    return ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE


def forget_failed(controller: Any, trial: Trial) -> None:
    """Remove a failed trial from the live trials of a Tune controller, which schedulers read."""
    controller.get_live_trials().discard(trial)


def resume_experiment(tuner: Tuner, resume: ResumeConfig) -> None:
    """Make `tuner.fit` resume the experiment in its folder.

    `tune.Tuner.restore` would use the stop rule and callbacks that were pickled when the experiment
    started, instead of this process's stop rule and callbacks.
    """
    local_tuner: Any = tuner._local_tuner
    local_tuner._tuner_kwargs["resume_config"] = resume


def replace_results(results: ResultGrid, replacement_for: Callable[[str, Any], Any]) -> ResultGrid:
    """Return Tune's results with each trial's result replaced.

    Args:
        results: Results of `Tuner.fit`.
        replacement_for: Function `(trial name, Tune's result)` that returns the replacement.
    """
    from ray.tune import ResultGrid

    class ReplacedResults(ResultGrid):
        def _trial_to_result(self, trial: Trial) -> Any:
            return replacement_for(str(trial), super()._trial_to_result(trial))

    return ReplacedResults(results._experiment_analysis)


class PastTrial:
    """Stand-in for a trial of an earlier attempt. Schedulers use only its id and name."""

    def __init__(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        self.trial_id, self.config = name, dict(config or {})

    def __str__(self) -> str:
        return self.trial_id


def mode_of(scheduler: object) -> str | None:
    """Return the mode (min or max) that a Tune scheduler was created with, or None."""
    return getattr(scheduler, "_mode", None)


def replay_past_trials(
    scheduler: TrialScheduler, past_reports: Mapping[str, Iterable[Mapping[str, float]]]
) -> None:
    """Replay the reports of ended trials of an earlier attempt into a scheduler.

    The scheduler then also compares new trials with these trials.

    Args:
        scheduler: Tune scheduler.
        past: Reports of each ended trial in order, by trial name.
    """
    for name, reports in past_reports.items():
        trial: Any = PastTrial(name)
        scheduler.on_trial_add(NO_TRIALS, trial)
        if last_report := replay(
            scheduler, trial, reports
        ):  # empty if the trial's folder was removed
            scheduler.on_trial_complete(NO_TRIALS, trial, last_report)


def replay(
    scheduler: TrialScheduler, trial: Trial, reports: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Replay earlier reports of a trial into a scheduler, and ignore its decisions.

    Args:
        scheduler: Tune scheduler, to which the trial has been added.
        trial: The trial.
        reports: Its reports in order.

    Returns:
        The last report, or {} if there are no reports.
    """
    last_report: dict[str, float] = {}
    for report in reports:
        last_report = dict(report)
        scheduler.on_trial_result(NO_TRIALS, trial, last_report)
        # The median stopping rule refuses reports of trials that it stopped. The order of this
        # replay differs from the original order, so the rule may stop a trial that continued in
        # the earlier attempt.
        getattr(scheduler, "_stopped_trials", set()).discard(trial)
    return last_report


NO_TRIALS: Any = SimpleNamespace(get_live_trials=list, search_alg=None)
"""Stand-in for a Tune controller without trials and without a searcher."""
