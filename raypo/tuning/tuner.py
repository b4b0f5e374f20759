"""Ray Tune's Tuner for runs of any recipe: the driver of scripts and of sweep files.

Processes: Tune runs each trial in an actor (`raypo.tuning.trial`). This process owns the shared
deployments, their pool, and the collector of the trials' placement groups.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import cloudpickle
import pandas as pd
from ray import tune
from ray.tune import ResultGrid, ResumeConfig, Stopper
from ray.tune.result import AUTO_RESULT_KEYS
from ray.tune.schedulers import PopulationBasedTraining, TrialScheduler
from ray.tune.search import BasicVariantGenerator, ConcurrencyLimiter
from ray.tune.search.variant_generator import generate_variants

from raypo.checks.model_checks import check_models
from raypo.checks.resume_checks import check_recorded_inputs
from raypo.cluster.placement import lay_out
from raypo.cluster.resources import alive_nodes
from raypo.config import AnyConfig, ConfigError, load_run_config, parse_run_config
from raypo.config.base import flatten
from raypo.config.sweep_config import MAX_TEST_POINTS, SharedRole, check_key, with_values
from raypo.inputs import cached_digests, record_inputs
from raypo.metrics.catalogue import HEADLINES, METRICS, doubt_about
from raypo.ray_internals import mode_of, replace_results, resume_experiment
from raypo.storage.checkpoints import find_checkpoint
from raypo.storage.folder import below, parent_and_name
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import Console
from raypo.trainer import RecipeTrainer, trainer_for
from raypo.trainer.settings import check_not_started_by_import
from raypo.tuning.board import Board
from raypo.tuning.capacity import SweepPlan, plan_trials
from raypo.tuning.experiment import (
    DRIVER_RESOURCES,
    Interruption,
    connected,
    group_gc_of_trials,
)
from raypo.tuning.goal import STEP, VALUE, Goal, check_metric
from raypo.tuning.record import Point
from raypo.tuning.schedule import with_score_gate
from raypo.tuning.shared import shared_deployments
from raypo.tuning.sweep_folder import TRIALS_FOLDER, base_changes
from raypo.tuning.trial import TrialSetup, point_of, run_trial

TUNE_FOLDER = "tune"
"""Folder of Tune's own files, relative to the experiment's folder."""
ARGUMENTS = "tuner.pkl"
"""File with the arguments of a `Tuner` and its base config, for `Tuner.restore`."""
RANDOM_POINTS = 20
"""Points of a random space that are validated against the run config before any trial starts."""


class Tuner:
    """Ray Tune's `Tuner`, whose trials are runs of one config with different values.

    Trials share the reference model, the reward models and the engines, like the trials of `raypo
    sweep`. A trial has the same results as a separate run.
    """

    def __init__(
        self,
        config: AnyConfig | Mapping[str, Any] | str | Path | RecipeTrainer[Any],
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: tune.TuneConfig | None = None,
        run_config: tune.RunConfig | None = None,
        share: Sequence[SharedRole] | Literal["auto"] = "auto",
    ) -> None:
        """Check the input, without starting anything.

        Args:
            config: Config that each trial changes: the config of any recipe, a mapping of its keys,
                the path of a run file, or a trainer. The reward function, callbacks, rows,
                `ScalingConfig`, `TorchConfig` and `worker_runtime_env` of a trainer are used too.
            param_space: Ray Tune's search space or a fixed value for each key of the run config
                (nested, or dotted like `learner.policy_lr`). None means that the searcher defines
                its own search space.
            tune_config: Ray Tune's config. `metric` is a metric of a run, like eval/score_mean. At
                most as many trials run concurrently as the cluster has room for.
            run_config: Ray Tune's config. The trials' runs are in `<storage_path>/<name>/trials`.
                `storage_path` defaults to the config's.
            share: Roles that are started once for all trials (reward, reference, engine), like
                `share` in a sweep file.

        Raises:
            ConfigError: a file, a key, a value or an argument is wrong.
        """
        trainer = config if isinstance(config, RecipeTrainer) else _trainer_of(config)
        self._trainer, self._base = trainer, trainer.config
        self._values: dict[str, Any] = trainer.config.model_dump()
        self._space = None if param_space is None else dict(param_space)
        self._tune_config = tune_config or tune.TuneConfig()
        self._run_config = run_config or tune.RunConfig()
        self._share: Sequence[SharedRole] | Literal["auto"] = share
        self._resume: ResumeConfig | None = None
        _check_run_config(self._run_config)
        storage = self._run_config.storage_path
        is_default = storage in (None, tune.RunConfig().storage_path)
        self._files = RunFiles(
            self._base.storage_path if is_default else str(storage),
            self._run_config.name or f"{self._base.name}-{time.strftime('%Y-%m-%d_%H-%M-%S')}",
        )
        self._check_metrics()
        self.trials = list(self._checked_trials())
        """Run configs that represent all trials: the points of a grid, and random draws."""

    @classmethod
    def restore(
        cls,
        path: str | Path,
        config: AnyConfig | Mapping[str, Any] | str | Path | RecipeTrainer[Any],
        *,
        resume_errored: bool = False,
    ) -> Self:
        """Return a `Tuner` whose `fit` resumes an experiment that was stopped or killed.

        Unfinished trials continue from the last checkpoints of their runs, and the searcher from
        its last result. A scheduler starts from scratch, as in Ray Tune's own `restore`. The search
        space, Tune's configs and `share` are taken from the start of the experiment.

        Args:
            path: Folder or URI of the experiment: its `location`.
            config: Config or trainer with which the experiment was started.
            resume_errored: Whether failed trials are resumed too.

        Raises:
            ConfigError: the folder holds no experiment, or one of another config.
        """
        files = RunFiles.at(str(path))
        content = files.read(ARGUMENTS)
        if content is None:
            raise ConfigError(
                f"path ({path}): holds no experiment of raypo.Tuner, as there is no {ARGUMENTS}. "
                f"Give the folder <storage_path>/<name> of its RunConfig. (`raypo sweep` resumes "
                f"its own folders.)"
            )
        base, arguments = cloudpickle.loads(content)
        storage_path, name = parent_and_name(files.location)
        run_config = replace(arguments["run_config"], storage_path=storage_path, name=name)
        tuner = cls(config, **{**arguments, "run_config": run_config})
        if changes := base_changes(parse_run_config(base, origin=files.location), tuner._base):
            lines = "\n  ".join(changes)
            raise ConfigError(
                f"config ({tuner._base.name}): {files.location} was started with another one:\n"
                f"  {lines}\nChange these keys back to resume, or start a new experiment."
            )
        check_recorded_inputs(tuner._base, files, given=tuner._trainer.given_functions)
        resume_types: Any = ResumeConfig.ResumeType  # Ray annotates them as str
        tuner._resume = ResumeConfig(
            errored=resume_types.RESUME if resume_errored else resume_types.SKIP
        )
        return tuner

    def fit(self) -> ResultGrid:
        """Run all trials.

        Returns:
            Ray Tune's results. The `path` of a result is the folder of the trial's run, with the
            model in `policy/` (or `reward_model/`). Its `metrics_dataframe` has every step. Its
            `checkpoint` is the run's training state for `from_checkpoint`, not a model.

        Raises:
            ConfigError: no trial fits the cluster, the folder holds another experiment, or a
                model's files are wrong.
            KeyboardInterrupt: a second Ctrl-C or SIGTERM; the first one ends all trials.
        """
        check_not_started_by_import()
        check_models(self._base)
        interruption = Interruption()
        message = f"Stopping all trials; Tuner.restore({self.location!r}, ...) resumes them."
        self._files.check_writable()
        with self._files.lock(), connected(self._base, interruption, message=message):
            if self._resume is None:
                self._check_folder()
            plan = self._plan()
            functions, is_resumed = self._trainer.given_functions, self._resume is not None
            for change in record_inputs(
                self._base, self._files, resumes=is_resumed, given=functions
            ):
                Console().message(f"changed input, accepted: {change}")
            if not is_resumed:
                self._write_arguments()
            Console().message(
                f"{self._files.name}: {plan.num_slots} trials at a time; files in "
                f"{self._files.location}"
            )
            for line in plan.sharing.lines():
                Console().message(line)
            board = Board(
                self._base,
                self.goal,
                plan,
                interruption=interruption,
                is_shown=self.shows_trials,
            )
            try:
                results = self.run(plan, board, interruption)
            finally:
                board.close()
            return replace_results(results, self._result)

    def run(
        self,
        plan: SweepPlan,
        board: Board,
        interruption: Interruption,
        *,
        values: Mapping[str, Any] | None = None,
        goal: Goal | None = None,
    ) -> ResultGrid:
        """Start the shared deployments, and run trials with them until Tune ends.

        `fit` calls it for scripts, and `raypo.tuning.sweep_file` for sweep files.

        Args:
            plan: Concurrency, and the deployments to share.
            board: Callback that records the trials.
            interruption: Callback that ends the experiment on request.
            values: Values of the base config as written. None means the resolved values.
            goal: Objective whose value is added to reports. None means the
                objective of Tune's config.

        Raises:
            PlacementError: the resources of the shared models were not free in time.
        """
        setup = self._trial_setup(values or self._values, goal or self.goal)
        scheduler, searcher = self._tune_config.scheduler, self._tune_config.search_alg
        if goal is None and isinstance(scheduler, TrialScheduler) and isinstance(self._metric, str):
            scheduler = with_score_gate(scheduler)
        sharing = shared_deployments(
            plan.sharing,
            self._base.with_absolute_paths(setup.working_dir),
            self._files.name,
            num_slots=plan.num_slots,
            logs_dir=str(self._files.logs_dir),
        )
        with group_gc_of_trials() as group_gc, sharing as shared:
            setup = replace(setup, group_gc=group_gc, shared=shared)
            tuner = tune.Tuner(
                tune.with_resources(
                    tune.with_parameters(run_trial, setup=setup),
                    tune.PlacementGroupFactory([DRIVER_RESOURCES]),
                ),
                param_space=self._space,
                tune_config=replace(
                    self._tune_config,
                    scheduler=scheduler,
                    trial_name_creator=self._tune_config.trial_name_creator
                    or partial(_trial_name, self._files.name),
                    max_concurrent_trials=None if limits_itself(searcher) else plan.num_slots,
                    # A stopped trial whose actor is reused finishes its step first. On GPUs it is
                    # killed at once instead, to free the GPUs.
                    reuse_actors=plan.device == "CPU" and not setup.is_population,
                ),
                run_config=replace(
                    self._run_config,
                    verbose=0 if self.shows_trials else self._run_config.verbose,
                    name=TUNE_FOLDER,
                    storage_path=self._files.location,
                    callbacks=[*(self._run_config.callbacks or ()), interruption, board],
                ),
            )
            if self._resume is not None:
                resume_experiment(tuner, self._resume)
            return tuner.fit()

    def _plan(self) -> SweepPlan:
        trainer, base, nodes = self._trainer, self._base, alive_nodes()
        use_gpu, worker_resources = bool(trainer.scaling_config.use_gpu), trainer.worker_resources
        lay_out(base, nodes, use_gpu=use_gpu, resources_per_worker=worker_resources)
        plan = plan_trials(
            base,
            self.trials,
            nodes,
            num_trials=self.num_trials,
            max_slots=self.max_concurrent,
            share=self._share,
            use_gpu=use_gpu,
            worker_resources=worker_resources,
        )
        searcher = self._tune_config.search_alg
        if limits_itself(searcher) and plan.num_slots < self.max_concurrent:
            raise ConfigError(
                f"search_alg ({type(searcher).__name__}): would start {self.max_concurrent} "
                f"trials at a time, but the cluster has room for {plan.num_slots}. Set its "
                f"max_concurrent to {plan.num_slots}, or give a searcher without its own limit."
            )
        return plan

    @property
    def goal(self) -> Goal:
        """Objective for the display: Tune's metric, else a score or loss of the recipe."""
        metric, mode = self._metric, self._tune_config.mode or mode_of(self._tune_config.scheduler)
        if not isinstance(metric, str):
            kind = "eval/" if self._base.measures_held_out else ("rollout/", "train/")
            names = [headline.name for headline in HEADLINES if headline.name.startswith(kind)]
            metric = next(name for name in names if not doubt_about(name, self._base.recipe))
        if mode is None:
            mode = "min" if metric in METRICS and METRICS[metric].sign < 0 else "max"
        return Goal((metric,), (1.0 if mode == "max" else -1.0,))

    def _trial_setup(self, values: Mapping[str, Any], goal: Goal) -> TrialSetup:
        trainer = self._trainer
        return TrialSetup(
            base=values,
            storage_path=below(self._files.location, TRIALS_FOLDER),
            working_dir=os.getcwd(),
            goal=goal,
            is_population=isinstance(self._tune_config.scheduler, PopulationBasedTraining),
            digests=cached_digests(),
            arguments=trainer.arguments_of_trials,
            train_callbacks=tuple(trainer.run_config.callbacks or ()),
            worker_runtime_env=dict(trainer.run_config.worker_runtime_env or {}),
        )

    @property
    def location(self) -> str:
        """Folder of the experiment: a path or a URI."""
        return self._files.location

    @property
    def num_trials(self) -> int:
        """Maximum number of trials. A stopping rule may end the experiment earlier."""
        count = self._tune_config.num_samples
        if count < 0:
            return sys.maxsize
        searcher = self._tune_config.search_alg
        if searcher is None or isinstance(searcher, BasicVariantGenerator):
            count *= sum(1 for _ in generate_variants(self._space or {}))
        return count

    @property
    def max_concurrent(self) -> int:
        """Maximum number of concurrent trials in Tune's config. The cluster may fit fewer."""
        searcher: Any = self._tune_config.search_alg
        config_limit = self._tune_config.max_concurrent_trials
        limit = searcher.max_concurrent if limits_itself(searcher) else config_limit
        return min(limit or self.num_trials, self.num_trials)

    @property
    def shows_trials(self) -> bool:
        """False if the user has chosen Ray's output, which prints all 75 metrics of each trial."""
        # Ray's RunConfig replaces None by a constant that is not the number that users give.
        is_default = self._run_config.verbose is tune.RunConfig().verbose
        return is_default and self._run_config.progress_reporter is None

    @property
    def _metric(self) -> Any:
        """The metric that the scheduler compares, or None."""
        scheduler_metric = getattr(self._tune_config.scheduler, "metric", None)
        return scheduler_metric or self._tune_config.metric

    def _check_metrics(self) -> None:
        """Refuse metrics of Tune's configs that neither a run nor Tune reports."""
        metrics_by_key = {
            "TuneConfig.metric": self._tune_config.metric,
            "scheduler.metric": getattr(self._tune_config.scheduler, "metric", None),
            "search_alg.metric": getattr(self._tune_config.search_alg, "metric", None),
        }
        stop_rule = self._run_config.stop
        if isinstance(stop_rule, Mapping):
            metrics_by_key |= {f"RunConfig.stop.{name}": name for name in stop_rule}
        for key, name in metrics_by_key.items():
            is_tune_metric = name in (STEP, VALUE, *AUTO_RESULT_KEYS)
            has_callbacks = bool(self._trainer.arguments_of_trials["callbacks"])
            if isinstance(name, str) and not is_tune_metric and not has_callbacks:
                check_metric(key, name, self._base)

    def _checked_trials(self) -> Iterator[AnyConfig]:
        """Yield run configs that represent all trials: the points of a grid, and random draws."""
        space = self._space or {}
        variants = (
            point
            for seed in range(RANDOM_POINTS)
            for _, point in generate_variants(space, random_state=seed)
        )
        points: list[Point] = []
        for variant in itertools.islice(variants, MAX_TEST_POINTS):
            point = point_of(variant, type(self._base))
            if point in points:
                continue
            points.append(point)
            if "ppo.preset" in point:
                raise ConfigError(
                    f"param_space.ppo.preset ({point['ppo.preset']}): the config already has the "
                    "values of its own preset, which would override those of another preset. "
                    "Search the keys themselves, like ppo.advantage, or search the preset by "
                    "`raypo sweep`."
                )
            for key in point:
                check_key(key, type(self._base), space="param_space")
            if "reward.function" in point and self._trainer.given_functions:
                raise ConfigError(
                    "param_space.reward.function: every trial has the function that the trainer "
                    "was given in Python. Leave one of the two out."
                )
            point_text = ", ".join(f"{key}={value}" for key, value in point.items())
            trial = with_values(self._values, {**point, "name": self._files.name})
            yield parse_run_config(
                trial, origin=f"a trial with {point_text}" if point_text else "a trial"
            )

    def _write_arguments(self) -> None:
        """Write the arguments for `restore`, before Tune changes the searcher and the scheduler."""
        arguments = {
            "param_space": self._space,
            "tune_config": self._tune_config,
            "run_config": self._run_config,
            "share": self._share,
        }
        base = self._base.model_dump(mode="json")
        self._files.write(ARGUMENTS, cloudpickle.dumps((base, arguments)))
        self._files.sync()

    def _check_folder(self) -> None:
        file_names = self._files.names()
        if file_names:
            raise ConfigError(
                f"RunConfig.name ({self._files.name}): {self._files.location} holds "
                f"{file_names[0]}. Choose another name, or leave it out for a generated name. "
                "Tuner.restore resumes an experiment that was stopped."
            )

    def _result(self, trial: str, result: Any) -> Any:
        """Add the run's folder, all steps and the last checkpoint to a trial's result."""
        files = RunFiles(below(self._files.location, TRIALS_FOLDER), trial)
        rows = files.metrics()
        if not rows:
            return result
        checkpoint = None
        with suppress(ConfigError):  # stopped before its first checkpoint
            checkpoint = tune.Checkpoint(find_checkpoint(files.location))
        return replace(
            result,
            path=files.location,
            checkpoint=checkpoint,
            metrics_dataframe=pd.DataFrame(rows),
        )


def _trial_name(experiment: str, trial: Any) -> str:
    return f"{experiment}-{trial.trial_id}"


def _trainer_of(config: AnyConfig | Mapping[str, Any] | str | Path) -> RecipeTrainer[Any]:
    if isinstance(config, str | Path):
        return trainer_for(load_run_config(config))
    if isinstance(config, Mapping):
        nested = with_values({}, flatten(config))
        return trainer_for(parse_run_config(nested, origin="config"))
    return trainer_for(config)


def _check_run_config(run_config: tune.RunConfig) -> None:
    """Refuse settings that have no effect on runs, and stop rules that Tune does not know."""
    if run_config.storage_filesystem is not None:
        raise ConfigError(
            f"RunConfig.storage_filesystem ({type(run_config.storage_filesystem).__name__}): runs "
            "write to storage_path. Give it as a URI, like s3://bucket/folder."
        )
    stop_rule = run_config.stop
    are_stoppers = isinstance(stop_rule, list) and all(
        isinstance(stopper, Stopper) for stopper in stop_rule
    )
    if not (
        stop_rule is None or are_stoppers or isinstance(stop_rule, Mapping) or callable(stop_rule)
    ):
        raise ConfigError(
            f"RunConfig.stop ({stop_rule!r:.80}): must be a mapping of metrics to values, a "
            "function (trial_id, result) -> bool, a tune.Stopper, or a list of these stoppers."
        )
    if (
        run_config.checkpoint_config is not None
        and run_config.checkpoint_config != tune.CheckpointConfig()
    ):
        raise ConfigError(
            "RunConfig.checkpoint_config: trials keep the checkpoints of their runs. Set the "
            "config keys checkpoint.every, checkpoint.keep and checkpoint.best_by."
        )


def limits_itself(searcher: object) -> bool:
    """Return True if a search algorithm, instead of Tune, limits the concurrent trials."""
    return isinstance(searcher, ConcurrencyLimiter | BasicVariantGenerator)
