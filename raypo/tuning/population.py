"""Population-based training: weak trials restart from the checkpoints of better trials.

At a fixed interval all trials wait for each other and are compared at the same step. Ray Tune then
passes checkpoints from trial to trial. The checkpoint that Tune sees is only a pointer: a folder
with a small file that names the run's own checkpoint (policy, critic, optimizers, KL controller,
data cursor). A trial that starts from the pointer copies the checkpoint into its own folder, with
hard links if both are on one disk.

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
from raypo.ray_internals import NO_TRIALS, forget_failed
from raypo.storage.checkpoints import SEGMENT
from raypo.storage.folder import below, link_tree, open_folder
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import STEP

COPIED = "copied"
"""Folder in a segment with the checkpoint that the segment started from."""
KEPT_CHECKPOINTS = 2
"""Minimum number of checkpoints that a trial keeps, because another trial may be copying one."""


class Population(PopulationBasedTraining):
    """Ray Tune's scheduler for synchronous population-based training, made deterministic.

    Its decisions depend only on the scores and the seed.
    """

    def __init__(
        self,
        *,
        every: int,
        num_steps: int,
        seed: int,
        last_comparison: int = 0,
        **arguments: Any,
    ) -> None:
        """Create a scheduler for trials that all run concurrently.

        Args:
            every: Steps between two comparisons.
            num_steps: Steps of a whole trial.
            seed: Seed of the drawn values.
            last_comparison: Step of the last comparison of an earlier attempt. 0 means none.
            arguments: Arguments of Ray Tune's scheduler.
        """
        super().__init__(
            perturbation_interval=every,
            burn_in_period=last_comparison + every,
            synch=True,
            log_config=False,
            **arguments,
        )
        self._every, self._num_steps, self._seed = every, num_steps, seed

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Add a trial, without Ray's check that refuses any searcher."""
        super().on_trial_add(NO_TRIALS, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict) -> str:
        """Pause a trial at the step of a comparison, unless it is the trial's last step."""
        step = result[STEP]
        if step % self._every or step >= self._num_steps:
            return self.CONTINUE
        random.seed(f"{self._seed} {step}")  # Ray's scheduler draws from the global generators
        np.random.seed(np.random.SeedSequence((self._seed, step)).generate_state(4))
        return super().on_trial_result(tune_controller, trial, result)

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        """Drop a failed trial from the comparison."""
        super().on_trial_error(tune_controller, trial)
        forget_failed(tune_controller, trial)  # otherwise the others would wait for it

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return the next trial to resume."""
        chosen = super().choose_trial_to_run(tune_controller)
        # If a trial failed while all others waited for it, compare the others now.
        live = list(tune_controller.get_live_trials())
        if chosen is None and live and all(trial.status == Trial.PAUSED for trial in live):
            self.on_trial_result(tune_controller, live[0], live[0].last_result)
            chosen = super().choose_trial_to_run(tune_controller)
        return chosen


def clamp_to_domains(domains: Mapping[str, Domain], config: dict[str, Any]) -> dict[str, Any]:
    """Return perturbed values moved to the nearest values of their domains."""
    return {key: domains[key].nearest(value) for key, value in config.items()}


@dataclass(frozen=True)
class Segment:
    """Part of a trial's run from one copied checkpoint to the next.

    Within a segment, Ray Train resumes by itself.
    """

    trial: str
    """Name of the trial."""
    number: int = 0
    resume_from: str | None = None
    """Copy of another trial's checkpoint that the segment starts from. None means from scratch."""
    checkpoint: str | None = None
    """Last checkpoint of the segment, initially `resume_from`."""
    known: Mapping[str, float] = field(default_factory=dict)
    """Known metrics of the trial at `checkpoint`."""
    compared: int = 0
    """Step of the last comparison after which the trial continued."""

    @classmethod
    def last(cls, files: RunFiles) -> Segment:
        """Read the current segment of a trial."""
        content = files.read(SEGMENT)
        return cls(files.name) if content is None else cls(**json.loads(content))

    @property
    def folder(self) -> str:
        """Folder of the segment, relative to the trial's folder."""
        return f"segment_{self.number}"

    def next(self, pointer: tune.Checkpoint, files: RunFiles) -> Segment:
        """Write and return the trial's segment after a comparison.

        If the pointer names this trial, the segment continues. If the pointer names another trial,
        a new segment starts from a copy of that trial's checkpoint. The copy is needed because the
        other trial will delete the original. The folder of the old segment is then removed.

        Raises:
            OSError: the other trial's checkpoint no longer exists. The current segment is then
                unchanged.
        """
        with pointer.as_directory() as pointer_folder:
            source_segment = Segment(**json.loads((Path(pointer_folder) / SEGMENT).read_text()))
        last_comparison = int(source_segment.known[STEP])
        if source_segment.trial == self.trial:
            segment = dataclasses.replace(self, compared=last_comparison)
            segment.write(files)
            return segment
        assert source_segment.checkpoint is not None
        next_segment = Segment(
            self.trial, number=self.number + 1, known=source_segment.known, compared=last_comparison
        )
        open_folder(
            files.location, next_segment.folder
        ).remove()  # left by an attempt that was killed
        copy_location = below(files.location, next_segment.folder, COPIED)
        copy_checkpoint(source_segment.checkpoint, copy_location)
        next_segment = dataclasses.replace(
            next_segment, resume_from=copy_location, checkpoint=copy_location
        )
        next_segment.write(files)
        open_folder(files.location, self.folder).remove()
        return next_segment

    def at(self, checkpoint: str, metrics: Mapping[str, float], files: RunFiles) -> Segment:
        """Write and return this segment with a later checkpoint.

        Args:
            checkpoint: Path from Ray Train, without the scheme of a URI.
            metrics: Known metrics of the trial at the checkpoint.
            files: The trial's folder.
        """
        path = below(files.location, self.folder, Path(checkpoint).name)
        segment = dataclasses.replace(self, checkpoint=path, known=dict(metrics))
        segment.write(files)
        return segment

    def write(self, files: RunFiles) -> None:
        """Write the segment to the trial's folder."""
        files.write(SEGMENT, json.dumps(dataclasses.asdict(self)).encode())
        files.sync()

    def report(self, report: dict[str, float]) -> None:
        """Report to Tune, with this segment as the pointer to the trial's checkpoint."""
        with tempfile.TemporaryDirectory(prefix="raypo-pointer-") as folder:
            (Path(folder) / SEGMENT).write_text(json.dumps(dataclasses.asdict(self)))
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(folder))

    def run_config(self, run_config: RunConfig, files: RunFiles) -> RunConfig:
        """Return Ray's run config with the segment's folder."""
        num_to_keep = (run_config.checkpoint_config or CheckpointConfig()).num_to_keep
        num_to_keep = num_to_keep and max(num_to_keep, KEPT_CHECKPOINTS)
        return dataclasses.replace(
            run_config,
            name=self.folder,
            storage_path=files.location,
            # Keep the newest checkpoints, not the best: other trials start from the newest one.
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
        )


def copy_checkpoint(source: str, target: str) -> None:
    """Copy another trial's checkpoint, with hard links if both paths are on one disk.

    Args:
        source: A local path or a URI.
        target: A path of the same kind, which does not exist yet.

    Raises:
        OSError: the source no longer exists.
    """
    if "://" in source:
        filesystem, path = FileSystem.from_uri(source)
        target_path = FileSystem.from_uri(target)[1]
        copy_files(
            path, target_path, source_filesystem=filesystem, destination_filesystem=filesystem
        )
    else:
        link_tree(source, target)
