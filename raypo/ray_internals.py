"""All that raypo uses of Ray that Ray does not promise to keep; no other module does.

`tests/unit/test_ray_internals.py` says which of it a new version of Ray has changed. Ray is
imported where it is needed: reading a run's files takes none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray.actor import ActorHandle
    from ray.train import Result
    from ray.train.torch import TorchTrainer
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import TrialScheduler

CHECKPOINTS = "checkpoint_manager_snapshot.json"
"""Ray Train's list of a run's checkpoints, in its folder; what it does not list is not whole."""
JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In which `ray job submit` hands its runtime environment to the driver."""
CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""What the head of a Ray answers, by gRPC, to whoever may connect."""


def address_file() -> Path:
    """Where `ray start` leaves the address of the Ray that it began on this machine."""
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(None))


def read_environment_again() -> None:
    """Have Ray's core, which read the variables when it was imported, go by those of now."""
    from ray import _raylet

    core: Any = _raylet
    core.Config.initialize("")


def readiness(actor: ActorHandle) -> Any:
    """A reference that is there once the actor answers calls."""
    ping: Any = actor.__ray_ready__  # pyright: ignore[reportAttributeAccessIssue]
    return ping.remote()


def cause_of(failure: BaseException) -> BaseException:
    """What a worker of Ray Train has raised, taken out of what Ray Train raises for it."""
    return getattr(failure, "_base_exc", failure)


def failed_to_start(failure: BaseException) -> bool:
    """Whether an actor is lost because its constructor raised."""
    return bool(getattr(failure, "actor_init_failed", False))


def kept_runs(storage: Any) -> tuple[FileSystem, str]:
    """Where Ray Train keeps its runs: a file system, and the path of their folder on it.

    Args:
        storage: `ray.train.get_context().get_storage()`.
    """
    return storage.storage_filesystem, storage.storage_fs_path


def checkpoint_folder(storage: Any, name: str) -> str:
    """The path on the run's file system at which Ray Train keeps a checkpoint of this name."""
    return storage.build_checkpoint_path_from_name(name)


def check_shared(storage: Any) -> None:
    """Refuse a run's folder that this node does not share with the others, as Ray's own copy does.

    Raises:
        RuntimeError: it does not.
    """
    storage._check_validation_file()


def leave_out_callbacks(trainer: TorchTrainer, names: Iterable[str]) -> None:
    """Have Ray Train's controller go without some of the callbacks that it makes by itself."""
    make = trainer._create_default_callbacks

    def make_others() -> list[Any]:
        return [each for each in make() if type(each).__name__ not in names]

    trainer._create_default_callbacks = make_others


def run_controllers_here(trainer: TorchTrainer) -> None:
    """Have Ray Train's controller run in the process of its trainer, where Ray starts another."""
    from ray.train.v2._internal.execution.controller import TrainController

    def run(**arguments: Any) -> Result:
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()

    trainer._initialize_and_run_controller = run


def is_driver() -> bool:
    """Return whether Ray's job ends with this process, which no task and no actor runs."""
    from ray._private.worker import SCRIPT_MODE, global_worker

    return global_worker.mode == SCRIPT_MODE


def forget_failed(controller: Any, trial: Trial) -> None:
    """Have schedulers, which look at a Tune controller's live trials, pass over a failed one."""
    controller.get_live_trials().discard(trial)


class PastTrial:
    """Stands for a trial of an earlier attempt; schedulers ask for no more than its id."""

    def __init__(self, name: str) -> None:
        self.trial_id = name


def tell_past(scheduler: TrialScheduler, past: Mapping[str, Iterable[Mapping[str, float]]]) -> None:
    """What trials of an earlier attempt reported, so that new ones are compared with them too.

    Args:
        past: Name of each trial that has ended -> its reports in order.
    """
    controller: Any = SimpleNamespace(get_live_trials=list)  # there are none
    for name, reports in past.items():
        trial: Any = PastTrial(name)
        scheduler.on_trial_add(controller, trial)
        last: Mapping[str, float] = {}
        for last in reports:
            scheduler.on_trial_result(controller, trial, dict(last))
            # The median rule would refuse to hear more of one that it stops; told in another
            # order than it happened, it may stop one that went on.
            getattr(scheduler, "_stopped_trials", set()).discard(trial)
        scheduler.on_trial_complete(controller, trial, dict(last))
