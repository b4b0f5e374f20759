"""Tune experiment whose trials are runs: the code that `raypo sweep` and `raypo.Tuner` share.

Processes: Tune runs each trial in an actor (`raypo.tuning.trial`). This process owns the shared
deployments, their pool, and the collector of the trials' placement groups.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import tune
from ray.actor import ActorHandle
from ray.tune import Callback, ResultGrid, ResumeConfig, Stopper
from ray.tune.experiment import Trial
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.stopper import CombinedStopper

from raypo.cluster.connect import connect
from raypo.cluster.placement_group_gc import start_placement_group_gc
from raypo.config import AnyConfig
from raypo.deployment.reserve import SAY_AFTER_S, waiting_groups
from raypo.ray_internals import resume_experiment
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import Console
from raypo.trainer.watch import stop_on_signal
from raypo.tuning.capacity import SweepPlan
from raypo.tuning.shared import started
from raypo.tuning.trial import TrialSetup

TUNE_FOLDER = "tune"
"""Folder of Tune's own files, relative to the sweep's folder."""
DRIVER_RESOURCES: dict[str, float] = {"memory": 1}
"""Resources of a trial's actor. They are tiny, because the learner workers reserve their resources
in separate placement groups. If the actors reserved more, trials could wait for each other."""
LOOK_EVERY_S = 2.0
"""Interval in seconds at which the placement groups of waiting trials are checked."""
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `stop_on_signal` handles signals
    # Reports of steps without an evaluation lack its metrics. Tune's strict check would refuse
    # them.
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # keep the working directory, where relative paths start
}
"""Environment variables that must be set before Ray starts."""


@dataclass
class StopOnRequest(Stopper):
    """Tune stopper that applies the user's rule, and ends all trials on request."""

    rule: Any = None
    """`tune.RunConfig.stop`: a mapping, a function, a stopper, or a list of stoppers."""
    is_wanted: bool = False

    def __post_init__(self) -> None:
        """Combine a list of stoppers into one."""
        if isinstance(self.rule, list):
            self.rule = CombinedStopper(*self.rule)

    def __call__(self, trial_id: str, result: dict) -> bool:
        """Return True if the user's rule stops this trial."""
        if isinstance(self.rule, Mapping):
            return any(result.get(name, -float("inf")) >= at for name, at in self.rule.items())
        return self.rule is not None and bool(self.rule(trial_id, result))

    def stop_all(self) -> bool:
        """Return True if all trials are to stop."""
        return self.is_wanted or (isinstance(self.rule, Stopper) and self.rule.stop_all())


class Interruption(Callback):
    """Tune callback that ends Tune's loop on request.

    Tune then saves its state with the trials unfinished, so that the experiment can be restored. A
    stopper would not do: Tune records its trials as ended, and restores the stopper too.
    """

    is_wanted = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks for its own restore

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """End the loop by the signal that Tune handles like Ctrl-C, if this was requested."""
        if self.is_wanted:
            signal.raise_signal(signal.SIGUSR1)


class RoomWatch(Callback):
    """Tune callback that prints which trial waits for resources, and which programs hold them.

    Each trial's run reports this too, but only to a log file, because that is where the output of
    Tune's actors goes.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """Time at which each waiting group was first seen, by name. inf means that it has been
        reported."""
        self._looked = -math.inf

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks for its own restore

    def on_step_end(self, iteration: int, trials: list[Trial], **_: Any) -> None:
        """Check the placement groups. Tune calls this after each iteration of its loop."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        names = tuple(f"raypo:{trial}:" for trial in trials)
        waiting = {name: why for name, why in waiting_groups().items() if name.startswith(names)}
        self._since = {name: self._since.get(name, now) for name in waiting}
        for name, since in self._since.items():
            if since <= now - SAY_AFTER_S:
                self._since[name] = math.inf  # reported
                Console().message(f"{name.split(':')[1]} waits for room: {waiting[name]}")


@contextmanager
def connected(base: AnyConfig, stop: StopOnRequest | Interruption, *, said: str) -> Iterator[None]:
    """Connect to Ray, and disconnect at the end if no caller had connected before.

    The first Ctrl-C or SIGTERM stops all trials, and the second raises KeyboardInterrupt. A signal
    to the whole process group also ends a local Ray. After the first signal a thread therefore
    checks Ray's head until Ray is disconnected, and ends this process if the head is gone.
    Otherwise Ray would try to reach the head for a minute, and then abort with a C++ error.

    Args:
        base: Run config of a trial.
        stop: Stopper or interruption of the experiment.
        said: Message at the first signal.
    """
    for name, value in TUNE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    is_own = connect(base.cluster)

    def stop_all() -> None:
        stop.is_wanted = True
        Console().message(said)

    with stop_on_signal(stop_all):
        try:
            yield
        finally:
            if is_own:
                ray.shutdown()


def fit_trials(
    trainable: Callable[..., None],
    setup: TrialSetup,
    base: AnyConfig,
    files: RunFiles,
    plan: SweepPlan,
    *,
    param_space: dict[str, Any] | None,
    tune_config: tune.TuneConfig,
    run_config: tune.RunConfig,
    stop: StopOnRequest,
    resume: ResumeConfig | None = None,
) -> ResultGrid:
    """Start the shared deployments, and run trials with them until Tune ends.

    Args:
        trainable: Function `(config, setup)` that runs a trial.
        setup: Settings of the trials, without the handles that this function adds.
        base: Run config of a trial, without the values of the space.
        files: The sweep's folder.
        plan: Concurrency, and the deployments to share.
        param_space: Search space, with the meaning that it has in `tune.Tuner`.
        tune_config: Tune's own config. The plan sets the number of concurrent trials, and whether
            Tune reuses actors.
        run_config: Tune's own config. The sweep sets its name and storage path, and `stop` replaces
            its stop rule. `RoomWatch` is added to its callbacks.
        stop: Stopper of the experiment.
        resume: Which trials of the experiment in the folder are resumed. None starts a new one.

    Raises:
        PlacementError: the resources of the shared models were not free in time.
    """
    sharing = started(
        plan.sharing,
        base.with_absolute_paths(setup.working_dir),
        files.name,
        num_slots=plan.num_slots,
        logs_dir=str(files.logs_dir),
    )
    with _group_gc() as group_gc, sharing as shared:
        setup = replace(setup, group_gc=group_gc, shared=shared)
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(trainable, setup=setup),
                tune.PlacementGroupFactory([DRIVER_RESOURCES]),
            ),
            param_space=param_space,
            tune_config=replace(
                tune_config,
                max_concurrent_trials=None
                if limits_itself(tune_config.search_alg)
                else plan.num_slots,
                # A stopped trial whose actor is reused finishes its step first. On GPUs it is
                # killed at once instead, to free the GPUs.
                reuse_actors=plan.device == "CPU" and not setup.is_population,
            ),
            run_config=replace(
                run_config,
                name=TUNE_FOLDER,
                storage_path=files.location,
                stop=stop,
                callbacks=[*(run_config.callbacks or ()), RoomWatch()],
            ),
        )
        if resume is not None:
            resume_experiment(tuner, resume)
        return tuner.fit()


@contextmanager
def _group_gc() -> Iterator[ActorHandle]:
    group_gc = start_placement_group_gc()
    try:
        yield group_gc
    finally:
        ray.get(group_gc.close.remote())  # removes groups of trials that were stopped at the end
        ray.kill(group_gc)


def limits_itself(searcher: object) -> bool:
    """Return True if a search algorithm, instead of Tune, limits the concurrent trials."""
    return isinstance(searcher, ConcurrencyLimiter | BasicVariantGenerator)
