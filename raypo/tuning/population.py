"""Population-based training: trials begin again from other trials' checkpoints.

Every some steps all trials wait for each other, and are compared at the same step. Ray Tune then
hands checkpoints from trial to trial; what it hands on here is a pointer, a folder with one small
file that names the run's own checkpoint: policy, critic, optimizers, KL controller, cursor. A trial
that begins with it takes a copy into its own folder, on one disk by hard links.

Paper: Jaderberg et al. 2017, arXiv:1711.09846.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow.fs import FileSystem, copy_files
from ray import tune
from ray.train import CheckpointConfig, RunConfig
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

from raypo.config.space import Domain
from raypo.ray_internals import forget_failed
from raypo.storage.folder import below, link_tree, open_folder
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import STEP
from raypo.tuning.search import POINT

SEGMENT = "segment.json"
COPIED = "copied"
"""Folder of a segment: the checkpoint that it began with."""
KEPT_CHECKPOINTS = 2
"""At least: all trials start at the same time, and one may still be copying another's."""


class Population(PopulationBasedTraining):
    """Ray Tune's, in step: what it decides depends on scores and the sweep's seed alone."""

    def __init__(
        self,
        *,
        every: int,
        num_steps: int,
        seed: int,
        last_comparison: int = 0,
        **arguments: Any,
    ) -> None:
        """Compare trials that all run at the same time.

        Args:
            every: Steps between two comparisons.
            num_steps: Of a whole trial.
            seed: Of the values that are drawn.
            last_comparison: Step of the last one that an earlier attempt has made.
        """
        super().__init__(
            perturbation_interval=every,
            burn_in_period=last_comparison + every,
            synch=True,
            log_config=False,
            **arguments,
        )
        self._every, self._num_steps, self._seed = every, num_steps, seed

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict) -> str:
        """Trials wait for each other where they are compared; at their end they are left alone."""
        step = result[STEP]
        if step % self._every or step >= self._num_steps:
            return self.CONTINUE
        random.seed(f"{self._seed} {step}")  # Ray draws from the process's own generators
        np.random.seed(np.random.SeedSequence((self._seed, step)).generate_state(4))
        return super().on_trial_result(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """The others do not wait for one that has failed, as Ray would."""
        super().on_trial_error(tune_controller, trial)
        forget_failed(tune_controller, trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The next trial to go on; those that wait for one that has failed are compared now."""
        chosen = super().choose_trial_to_run(tune_controller)
        live = list(tune_controller.get_live_trials())
        if chosen is None and live and all(trial.status == Trial.PAUSED for trial in live):
            self.on_trial_result(tune_controller, live[0], live[0].last_result)
            chosen = super().choose_trial_to_run(tune_controller)
        return chosen


def inside(domains: Mapping[str, Domain], config: dict[str, Any]) -> dict[str, Any]:
    """A Tune config whose perturbed values are brought back into their domains."""
    point = {key: domains[key].nearest(value) for key, value in config[POINT].items()}
    return {**config, POINT: point}


@dataclass(frozen=True)
class Segment:
    """A stretch of a trial's run between two copies; Ray Train resumes within it by itself."""

    trial: str
    """Its name."""
    number: int = 0
    resume_from: str | None = None
    """A copy of another trial's checkpoint, which it begins with while it has made none."""
    checkpoint: str | None = None
    """The last one; `resume_from` where there is no other."""
    known: Mapping[str, float] = field(default_factory=dict)
    """What was known of the trial at that checkpoint."""
    compared: int = 0
    """Step of the last comparison after which it went on."""

    @classmethod
    def last(cls, files: RunFiles) -> Segment:
        """The one that a trial is in."""
        written = files.read(SEGMENT)
        return cls(files.name) if written is None else cls(**json.loads(written))

    @property
    def folder(self) -> str:
        """Below the trial's own."""
        return f"segment_{self.number}"

    def next(self, pointer: tune.Checkpoint, files: RunFiles) -> Segment:
        """After a comparison: a new one where the pointer is another trial's, else this one.

        The new one has a copy of the other trial's checkpoint, which the other one deletes some
        time. What this trial has made so far nobody needs any more.

        Raises:
            OSError: the checkpoint is gone; nothing has changed then.
        """
        with pointer.as_directory() as folder:
            other = Segment(**json.loads((Path(folder) / SEGMENT).read_text()))
        compared = int(other.known[STEP])
        if other.trial == self.trial:
            same = dataclasses.replace(self, compared=compared)
            same.write(files)
            return same
        assert other.checkpoint is not None
        following = Segment(
            self.trial, number=self.number + 1, known=other.known, compared=compared
        )
        open_folder(files.location, following.folder).remove()  # of an attempt that was killed
        copied = below(files.location, following.folder, COPIED)
        copy_checkpoint(other.checkpoint, copied)
        following = dataclasses.replace(following, resume_from=copied, checkpoint=copied)
        following.write(files)
        open_folder(files.location, self.folder).remove()
        return following

    def at(self, checkpoint: str, known: Mapping[str, float], files: RunFiles) -> Segment:
        """The same with a later checkpoint, also in the trial's folder.

        Args:
            checkpoint: Its path as Ray Train says it, without the scheme of a URI.
        """
        path = below(files.location, self.folder, Path(checkpoint).name)
        later = dataclasses.replace(self, checkpoint=path, known=dict(known))
        later.write(files)
        return later

    def write(self, files: RunFiles) -> None:
        """Keep it in the trial's folder."""
        files.write(SEGMENT, json.dumps(dataclasses.asdict(self)).encode())
        files.sync()

    def report(self, report: dict[str, float]) -> None:
        """Report to Tune, with this as the pointer to the trial's checkpoint."""
        with tempfile.TemporaryDirectory(prefix="raypo-pointer-") as folder:
            (Path(folder) / SEGMENT).write_text(json.dumps(dataclasses.asdict(self)))
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))

    def run_config(self, run_config: RunConfig, files: RunFiles) -> RunConfig:
        """Ray's run config, in a folder of the segment's own."""
        kept = run_config.checkpoint_config or CheckpointConfig()
        num_to_keep = kept.num_to_keep and max(kept.num_to_keep, KEPT_CHECKPOINTS)
        return dataclasses.replace(
            run_config,
            name=self.folder,
            storage_path=files.location,
            # The newest ones, whatever is best: others may begin with them.
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
        )


def copy_checkpoint(source: str, target: str) -> None:
    """Copy another trial's checkpoint, which that trial may delete; hard links on one disk.

    Args:
        source: A local path or a URI, as the target is.
        target: Nothing is there yet.

    Raises:
        OSError: the source is gone.
    """
    if "://" in source:
        system, path = FileSystem.from_uri(source)
        into = FileSystem.from_uri(target)[1]
        copy_files(path, into, source_filesystem=system, destination_filesystem=system)
    else:
        link_tree(source, target)
