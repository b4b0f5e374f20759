"""One learner worker's run: the config, the other workers, the run's files, and the driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray.util
import torch

from raypo.cluster.devices import check_capability
from raypo.cluster.out_of_memory import LEARNER_REMEDY, memory_advice
from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.custom.errors import UserCodeError
from raypo.run.setup import Runtime, decided_together, open_setup
from raypo.storage.run_files import RunFiles, close_files
from raypo.tracking.logs import log_to_file

AnyConfig = TypeVar("AnyConfig", covariant=True)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run(Generic[AnyConfig]):
    """Context that every part of a run needs. The recipe's loop creates the parts."""

    config: AnyConfig
    runtime: Runtime
    workers: Workers
    files: RunFiles
    tell: MonitorClient
    """Client that sends messages to the driver's console."""
    at_end: ExitStack = field(default_factory=ExitStack)
    """Callbacks that close the parts of the run. The part that was created last is closed first."""
    started: float = field(default_factory=time.monotonic)
    """Start time of the driver, or of this worker if there is no driver, on this process's
    monotonic clock."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.runtime.name

    @property
    def log_path(self) -> Path:
        """Log file of this worker, which gets the output of libraries."""
        return self.files.log_path(f"worker_{self.workers.rank}.log")


@contextmanager
def open_run(setup: dict[str, Any]) -> Iterator[Run[Any]]:
    """Set up a worker's run before any model is loaded, and close its parts at the end.

    Args:
        setup: The config as a dictionary, with the driver's additions.
    """
    config, runtime = open_setup(setup)
    workers = Workers.current()
    tell = MonitorClient(runtime.monitor if workers.rank == 0 else None)
    if config.learner.is_elastic:
        most, config = config.learner.num_workers, config.with_workers(workers.count)
        tell.message(f"learner workers: {workers.count} of at most {most}")
    if torch.cuda.is_available():
        device = torch.cuda.current_device()
        # DeepSpeed takes LOCAL_RANK as the index of its GPU. Ray Train counts local ranks over all
        # workers on a machine, whichever GPUs each of them sees.
        os.environ["LOCAL_RANK"] = str(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        config = decided_together(
            config, workers, runtime.decide, gpu_bytes=memory, tell=tell.message
        )
    started = time.monotonic() - tell.begin_attempt(ray.util.get_current_placement_group())
    files = RunFiles(runtime.storage_path, runtime.name)
    with ExitStack() as at_end:
        at_end.callback(close_files, files)  # the last one: all other parts may still write files
        run = Run(config, runtime, workers, files, tell, at_end, started)
        of_all_workers = MonitorClient(runtime.monitor)
        log_to_file(run.log_path, on_print=tell.message, on_event=of_all_workers.event)
        torch.set_num_threads(config.learner.cpus_per_worker)
        check_capability(config.model.dtype)
        if runtime.group_gc is not None and workers.rank == 0:
            runtime.group_gc.hold.remote(runtime.monitor, ray.util.get_current_placement_group())
            runtime.group_gc.end_turn.remote(runtime.name)
        try:
            with memory_advice(f"learner worker {workers.rank}", LEARNER_REMEDY):
                yield run
        except Exception as error:
            logger.exception("the run failed")
            if isinstance(error, UserCodeError):
                error.log = str(run.log_path)
            raise
