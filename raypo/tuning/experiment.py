"""The process that runs Tune's loop: Ray's connection, and signals."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.tune import Callback
from ray.tune.experiment import Trial

from raypo.cluster.connect import connect
from raypo.cluster.placement_group_gc import start_placement_group_gc
from raypo.config import AnyConfig
from raypo.tracking.console import Console
from raypo.trainer.watch import stop_on_signal

DRIVER_RESOURCES: dict[str, float] = {"memory": 1}
"""Resources of a trial's actor. They are tiny, because the learner workers reserve their resources
in separate placement groups. If the actors reserved more, trials could wait for each other."""
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `stop_on_signal` handles signals
    # Reports of steps without an evaluation lack its metrics. Tune's strict check would refuse
    # them.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # keep the working directory, where relative paths start
}
"""Environment variables that must be set before Ray starts."""


class Interruption(Callback):
    """Tune callback that ends Tune's loop on request.

    Tune then saves its state with the trials unfinished, so that the experiment can be restored. A
    stopper is no alternative: Tune would record its trials as ended, and restore the stopper too.
    """

    is_wanted = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks for its own restore

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """If requested, end the loop with the signal that Tune handles like Ctrl-C."""
        if self.is_wanted:
            # Tune would print how to resume with `tune.Tuner.restore`, which does not work here.
            logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
            signal.raise_signal(signal.SIGUSR1)


@contextmanager
def connected(base: AnyConfig, interruption: Interruption, *, message: str) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end if no caller had connected before.

    The first Ctrl-C or SIGTERM stops all trials, and the second raises KeyboardInterrupt. A signal
    to the whole process group also ends a local Ray. After the first signal a thread therefore
    checks Ray's head until Ray is disconnected, and ends this process if the head is gone.
    Otherwise Ray would try to reach the head for a minute, and then abort with a C++ error.

    Args:
        base: Run config of a trial.
        interruption: Interruption of the experiment.
        message: Message at the first signal.
    """
    for name, value in TUNE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    is_own = connect(base.cluster)

    def stop_all() -> None:
        interruption.is_wanted = True
        Console().message(message)

    with stop_on_signal(stop_all):
        try:
            yield
        finally:
            if is_own:
                ray.shutdown()


@contextmanager
def group_gc_of_trials() -> Iterator[ActorHandle]:
    """Start the garbage collector of the trials' placement groups, and close it at the end."""
    group_gc = start_placement_group_gc()
    try:
        yield group_gc
    finally:
        ray.get(group_gc.close.remote())  # removes groups of trials that were stopped at the end
        ray.kill(group_gc)
