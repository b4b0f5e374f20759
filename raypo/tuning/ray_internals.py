"""What a sweep uses of Ray that Ray does not promise to keep; nothing else in this room does.

Its tests say when a version of Ray has changed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from ray.train import Result
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.tune.schedulers import TrialScheduler


def run_controllers_here(trainer: TorchTrainer) -> None:
    """Have Ray Train's controller run in the process of its trainer, where Ray starts another."""

    def run(**arguments: Any) -> Result:
        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()

    trainer._initialize_and_run_controller = run


class PastTrial:
    """Stands for a trial of an earlier attempt; schedulers ask for no more than its id."""

    def __init__(self, name: str) -> None:
        self.trial_id = name


class _Controller:
    @staticmethod
    def get_live_trials() -> list[Any]:
        return []


def tell_past(scheduler: TrialScheduler, past: Mapping[str, Iterable[Mapping[str, float]]]) -> None:
    """What trials of an earlier attempt reported, so that new ones are compared with them too.

    Args:
        past: Name of each trial that has ended -> its reports in order.
    """
    controller: Any = _Controller()
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
