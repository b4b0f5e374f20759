"""Uses of Ray's private APIs, which no other module touches.

`tests/unit/test_ray_internals.py` fails if a new version of Ray has changed one of them. Ray is
imported inside functions, so that reading a run's files does not import it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
"""File in which Ray Train lists a run's checkpoints. A checkpoint that it lacks is incomplete."""
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable in which `ray job submit` passes its runtime environment to the driver."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""gRPC method that a Ray head node answers if the client's token is valid."""


def address_file() -> Path:
    """Return the file in which `ray start` writes the address of the Ray on this machine."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def read_environment_again() -> None:
    """Make Ray's core read the environment variables again. It first read them on import."""
    from ray import _raylet

    core: Any = _raylet
    core.Config.initialize("")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let a Ray that is started in this context listen on the loopback interface only.

    Ray does so on macOS and Windows. Elsewhere its ports, which can run code, are open to the
    network, and `ray.init` has no argument against it.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def readiness(actor: ActorHandle) -> Any:
    """Return an object reference that is ready once the actor answers calls."""
    ping: Any = actor.__ray_ready__  # pyright: ignore[reportAttributeAccessIssue]
    return ping.remote()


def cause_of(failure: BaseException) -> BaseException:
    """Return the exception of a Ray Train worker, unwrapped from Ray Train's own exception."""
    return getattr(failure, "_base_exc", failure)


def failed_to_start(failure: BaseException) -> bool:
    """Return True if an actor is lost because its constructor raised."""
    return bool(getattr(failure, "actor_init_failed", False))


def kept_runs(storage: Any) -> tuple[FileSystem, str]:
    """Return the file system on which Ray Train stores runs, and the path of their folder.

    Args:
        storage: `ray.train.get_context().get_storage()`.
    """
    return storage.storage_filesystem, storage.storage_fs_path


def checkpoint_folder(storage: Any, name: str) -> str:
    """Return the path of a checkpoint of Ray Train on the run's file system."""
    return storage.build_checkpoint_path_from_name(name)


def checkpoint_list(kept: Iterable[tuple[str, Mapping[str, Any]]]) -> bytes:
    """Return the content of `CHECKPOINTS` for these checkpoints.

    The checkpoint of the highest step is listed as the latest.

    Args:
        kept: Folder name and reported metrics (with `step`) of each checkpoint, in ascending order
            of score.
    """
    from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
        _CheckpointManagerState,
        _TrainingResultState,
    )

    results = [
        _TrainingResultState(checkpoint_dir_name=name, metrics=dict(metrics))
        for name, metrics in kept
    ]
    by_step = sorted(results, key=lambda each: each.metrics["step"])
    state = _CheckpointManagerState(
        checkpoint_results=results,
        checkpoint_report_indices=[by_step.index(each) for each in results],
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
    """Run Ray Train's check that this node sees the files in the run's folder.

    Raises:
        RuntimeError: this node does not see the folder's files.
    """
    storage._check_validation_file()


@contextmanager
def without_worker_output() -> Iterator[None]:
    """Suppress the output of Ray's workers in this process, as `log_to_driver=False` would.

    If the user has called `ray.init()`, Ray would otherwise print each line of that output.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    handlers, dispatcher.handlers = dispatcher.handlers, []
    try:
        yield
    finally:
        dispatcher.handlers = handlers


def leave_out_callbacks(trainer: TorchTrainer, names: Iterable[str]) -> None:
    """Remove some default callbacks of Ray Train's controller, by class name."""
    make = trainer._create_default_callbacks

    def make_others() -> list[Any]:
        return [each for each in make() if type(each).__name__ not in names]

    trainer._create_default_callbacks = make_others


def run_controllers_here(trainer: TorchTrainer) -> None:
    """Run Ray Train's controller in the trainer's process. Ray would otherwise start an actor."""
    from ray.train.v2._internal.execution.controller import TrainController

    def run(**arguments: Any) -> Result:
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()

    trainer._initialize_and_run_controller = run


def dashboard_address() -> str | None:
    """Return the address of the connected cluster's dashboard, or None if it has none.

    `ray.init().dashboard_url` is right only in drivers. In a worker, such as a trial of Ray Tune,
    it has the default port, whatever port the dashboard uses (Ray 2.60).
    """
    from ray._private.services import get_webui_url_from_internal_kv

    if given := os.environ.get("RAY_OVERRIDE_DASHBOARD_URL"):
        return given
    return get_webui_url_from_internal_kv() or None


def has_autoscaler() -> bool:
    """Return whether the connected cluster has an autoscaler, which can add nodes.

    Every Ray cluster runs the autoscaler's process. Without an autoscaler config, that process only
    reports the nodes.
    """
    import ray
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.autoscaler._private.util import format_readonly_node_type
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):  # v2 knows the id of each node in the cloud
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        return any(each.instance_id for each in [*status.active_nodes, *status.idle_nodes])
    # Version 1 takes the names of node types from its config. Without a config, it names them after
    # the nodes.
    report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
    summary = report.get("autoscaler_report") or {}
    types = {*summary.get("active_nodes", ()), *(summary.get("idle_nodes") or ())}
    others = [*summary.get("pending_nodes", ()), *summary.get("failed_nodes", ())]
    types |= {node_type for _, node_type, *_ in others}
    return not types <= {format_readonly_node_type(node["NodeID"]) for node in ray.nodes()}


def is_driver() -> bool:
    """Return True if this process is the driver of Ray's job, not a task or an actor."""
    import ray

    # Without a connection, Ray's context would start a local Ray.
    return ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.SCRIPT_MODE


def forget_failed(controller: Any, trial: Trial) -> None:
    """Remove a failed trial from a Tune controller's live trials, which schedulers read."""
    controller.get_live_trials().discard(trial)


def resume_experiment(tuner: Tuner, resume: ResumeConfig) -> None:
    """Let `tuner.fit` go on with the experiment in its folder.

    `tune.Tuner.restore` would use the stop rule and the callbacks that were pickled when the
    experiment began, instead of those of this process.
    """
    local: Any = tuner._local_tuner
    local._tuner_kwargs["resume_config"] = resume


def with_runs(results: ResultGrid, result_of: Callable[[str, Any], Any]) -> ResultGrid:
    """Return Tune's results with each trial's result replaced.

    Args:
        results: Results of `Tuner.fit`.
        result_of: Function `(trial's name, Tune's result)` that returns the replacement.
    """
    from ray.tune import ResultGrid

    class Runs(ResultGrid):
        def _trial_to_result(self, trial: Trial) -> Any:
            return result_of(str(trial), super()._trial_to_result(trial))

    return Runs(results._experiment_analysis)


class PastTrial:
    """Stand-in for a trial of an earlier attempt; schedulers use only its id and name."""

    def __init__(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        self.trial_id, self.config = name, dict(config or {})

    def __str__(self) -> str:
        return self.trial_id


def mode_of(scheduler: object) -> str | None:
    """Return the mode (min or max) that a Tune scheduler was created with, or None."""
    return getattr(scheduler, "_mode", None)


def tell_past(scheduler: TrialScheduler, past: Mapping[str, Iterable[Mapping[str, float]]]) -> None:
    """Replay the reports of an earlier attempt's ended trials into a scheduler.

    The scheduler then compares new trials with the earlier ones.

    Args:
        scheduler: Tune scheduler.
        past: Reports of each ended trial in order, by the trial's name.
    """
    for name, reports in past.items():
        trial: Any = PastTrial(name)
        scheduler.on_trial_add(NO_TRIALS, trial)
        if last := replay(scheduler, trial, reports):  # empty if the trial's folder was removed
            scheduler.on_trial_complete(NO_TRIALS, trial, last)


def replay(
    scheduler: TrialScheduler, trial: Trial, reports: Iterable[Mapping[str, float]]
) -> dict[str, float]:
    """Replay earlier reports of a trial into a scheduler, whose decisions are ignored.

    Args:
        scheduler: Tune scheduler, to which the trial has been added.
        trial: The trial.
        reports: Its reports in order.

    Returns:
        The last report, empty if there is none.
    """
    last: dict[str, float] = {}
    for report in reports:
        last = dict(report)
        scheduler.on_trial_result(NO_TRIALS, trial, last)
        # The median stopping rule refuses reports of trials that it stopped. The order of this
        # replay differs from the original order, so the rule may stop a trial that continued in
        # the earlier attempt.
        getattr(scheduler, "_stopped_trials", set()).discard(trial)
    return last


NO_TRIALS: Any = SimpleNamespace(get_live_trials=list, search_alg=None)
"""Stand-in for Tune's controller, without trials and searcher."""
