"""Sweep file: search space over a run config, search algorithm, and ranking of trials."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator

from raypo.config.base import (
    Config,
    ConfigError,
    RunFile,
    flatten,
    read_yaml,
)
from raypo.config.fields import known_keys
from raypo.config.only_if import only_if
from raypo.config.recipe_config import AnyConfig, parse_run_config
from raypo.config.refusals import remedy_for_unknown
from raypo.config.run_config import OnlineConfig, PPOConfig
from raypo.config.sources import one_or_many
from raypo.config.space import Domain, flat_space
from raypo.config.supervised_config import PolicyExamplesConfig, RewardModelConfig

SET_BY_SWEEP = (
    "name",
    "recipe",
    "storage_path",
    "cluster",
    "logging",
    "checkpoint.keep",
    "max_failures",
    "placement",
    "num_steps",
    "num_epochs",
    "learner.num_workers",
    "learner.min_workers",
    "learner.critic_workers",
    "learner.cpus_per_worker",
    "learner.use_gpu",
)
"""Keys and sections of the run config that a search space cannot contain."""
SharedRole = Literal["reward", "reference", "judge", "engine"]
MAX_TEST_POINTS = 1000
"""Maximum number of points of the space that are validated against the run config."""
_FIXED_BY_CHECKPOINT = ("model.", "learner.optimizer.", "ppo.advantage.", "ppo.preset.")
"""Prefixes of keys that must not change when a run resumes from a checkpoint."""
_CONSTRAINT = re.compile(r"\s*([\w/.@-]+)\s*(<=|>=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")


def _as_section(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class SchedulerSection(Config):
    """Trial scheduler. `scheduler: asha` is short for `scheduler: {kind: asha}`."""

    kind: Literal["none", "asha", "median", "pbt"] = "none"
    """Scheduling algorithm. none: every trial runs to its end; asha: only the best fraction
    continues at each rung (arXiv:1810.05934); median: a trial that is worse than the median of the
    others is stopped; pbt: the worst trials copy the best and perturb its values
    (arXiv:1711.09846)."""
    grace_steps: Annotated[int | None, only_if("kind", "asha", "median")] = Field(
        default=None, ge=1
    )
    """Steps before a trial may be stopped. null means `eval.every` of the base. A
    trial is never stopped before it has a score from after the first update."""
    reduction_factor: Annotated[float, only_if("kind", "asha")] = Field(default=3.0, gt=1.0)
    """One in this many trials continues at each rung."""
    perturb_every: Annotated[int | None, only_if("kind", "pbt")] = Field(default=None, ge=1)
    """Steps between comparisons, at which trials wait for each other. null means `eval.every`
    of the base."""
    quantile: Annotated[float, only_if("kind", "pbt")] = Field(default=0.25, gt=0.0, le=0.5)
    """Fraction of the trials that is replaced by copies of the best."""
    resample: Annotated[float, only_if("kind", "pbt")] = Field(default=0.25, ge=0.0, le=1.0)
    """Probability that the value of a key is drawn again instead of multiplied by 0.8 or 1.2.
    """


@dataclass(frozen=True)
class Constraint:
    """A bound on a metric, like `kl/ref_response_mean <= 10`. A trial that violates it ranks below
    all others.
    """

    metric: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Parse a constraint from text.

        Raises:
            ValueError: the text is not METRIC <= NUMBER or METRIC >= NUMBER.
        """
        match = _CONSTRAINT.fullmatch(text)
        if match is None:
            raise ValueError(
                "must be METRIC <= NUMBER or METRIC >= NUMBER. Write it like "
                "'kl/ref_response_mean <= 10'."
            )
        return cls(match[1], match[2], float(match[3]))

    def excess(self, value: float) -> float:
        """Return how far a value is beyond the bound.

        0 or less means that the value satisfies the bound. For NaN the result is infinity.
        """
        if math.isnan(value):
            return math.inf
        return value - self.bound if self.sign == "<=" else self.bound - value

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"


AnyConstraint = Annotated[
    Constraint,
    BeforeValidator(lambda value: Constraint.parse(value) if isinstance(value, str) else value),
    PlainSerializer(str),
]


class SweepConfig(RunFile):
    """A sweep file."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the sweep; its folder is <storage_path>/<name>/."""
    base: str
    """Run config (YAML) that each trial starts from. A relative path is resolved against the
    driver's working directory."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the base for all trials, like {num_steps: 8}."""
    space: dict[str, Annotated[Domain, PlainSerializer(Domain.as_written)]] = Field(min_length=1)
    """Search space: a domain for each key of the base that varies, like {learner.policy_lr:
    {loguniform: [1.0e-7, 1.0e-5]}}. The kinds of domain are choice, grid, uniform, loguniform
    and randint."""
    metric: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = ("eval/score_mean",)
    """Metric, or list of metrics, whose last values rank the trials. Several metrics give a Pareto
    front."""
    mode: Annotated[tuple[Literal["max", "min"], ...], BeforeValidator(one_or_many)] = ("max",)
    """Direction of each metric. max: larger is better; min: smaller is better."""
    num_samples: int | None = Field(default=None, ge=1)
    """Number of trials. null means 8, or with `searcher: grid` the whole grid. A larger number adds
    trials to a finished sweep."""
    searcher: Literal["optuna", "random", "grid"] = "optuna"
    """Search algorithm. optuna: TPE (arXiv:2304.11127); random: independent draws; grid: every
    combination."""
    scheduler: Annotated[SchedulerSection, BeforeValidator(_as_section)] = SchedulerSection()
    max_concurrent: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of trials that run at the same time. auto: as many as fit. Trials that do not
    fit wait."""
    constraint: Annotated[tuple[AnyConstraint, ...], BeforeValidator(one_or_many)] = ()
    """Constraint, or list of constraints, like `kl/ref_response_mean <= 10`. A trial that violates
    a constraint ranks below all others."""
    share: Annotated[tuple[SharedRole, ...], BeforeValidator(one_or_many)] | Literal["auto"] = (
        "auto"
    )
    """Roles that are started once and shared by all trials: reward, reference, judge, engine. A
    role is not shared if the space changes it, or if it is dedicated. Engines that hold adapters
    serve all trials at the same time. Other engines pass from trial to trial on CPUs; on GPUs each
    trial starts its own. auto: all roles; on GPUs, only if sharing does not reduce the number of
    concurrent trials."""
    seed: int = Field(default=0, ge=0)
    """Random seed of the searcher. The seed of a run is the key `seed` of the base."""

    @field_validator("space", mode="before")
    @classmethod
    def _domains(cls, space: Any) -> Any:
        if not isinstance(space, Mapping):
            return space
        flat = flat_space({str(key): value for key, value in space.items()})
        return {key: Domain.parse(key, value) for key, value in flat.items()}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if len(self.mode) != len(self.metric) or not self.metric:
            yield (
                f"mode ({list(self.mode)}): there must be one mode for each metric "
                f"({list(self.metric)}). Write as many modes as metrics."
            )
        ranges = [key for key, domain in self.space.items() if not domain.is_list]
        grids = [key for key, domain in self.space.items() if domain.kind == "grid"]
        if self.searcher == "grid" and ranges:
            yield (
                f"searcher (grid): space.{ranges[0]} is a range and has no last value. Write "
                f"grid: [...] there, or set searcher to random or optuna."
            )
        elif self.searcher == "grid" and self.num_samples is not None:
            yield (
                f"num_samples ({self.num_samples}): a grid search runs the whole grid, "
                f"{self.num_trials} trials. Remove num_samples, or set searcher to random."
            )
        elif self.searcher != "grid" and grids:
            yield (
                f"space.{grids[0]} (grid): only searcher: grid tries every value. Write choice: "
                f"[...] there, or set searcher to grid."
            )
        if self.scheduler.kind == "pbt" and len(self.metric) > 1:
            yield (
                f"scheduler.kind (pbt): copies the best trial, but with {len(self.metric)} "
                "metrics no single trial is best. Give one metric, or another scheduler."
            )
        if self.scheduler.kind == "pbt" and self.searcher == "optuna":
            yield (
                "searcher (optuna): pbt changes the values while trials run, which optuna cannot "
                "follow. Set searcher to random or grid."
            )

    @property
    def num_trials(self) -> int:
        """Total number of trials."""
        if self.searcher == "grid":
            return math.prod(len(domain.values) for domain in self.space.values())
        return self.num_samples or 8

    def base_config(self) -> AnyConfig:
        """Validate the sweep and return the run config that each trial starts from.

        Raises:
            ConfigError: the base or an override is wrong, the base lacks a key of `space`, or the
                base refuses a value of `space`.
        """
        base = parse_run_config(self.base_values(), origin=self.base)
        if not isinstance(base, OnlineConfig):
            _check_examples(self, base)
        for key in self.space:
            check_key(key, type(base))
        for point_label, trial in self.trials():
            _check_metrics(self, trial, point_label)
            _check_stop(trial, point_label)
        _check_sharing(self, base)
        _check_pbt(self, base)
        return base

    def trials(self) -> Iterator[tuple[str, AnyConfig]]:
        """Yield the label and the run config of each point of the space to validate."""
        values = self.base_values()
        for point in _test_points(self):
            point_label = ", ".join(f"{key}={value}" for key, value in point.items())
            yield (
                point_label,
                parse_run_config(with_values(values, point), origin=f"space, {point_label}"),
            )

    def perturb_every(self, base: AnyConfig) -> int:
        """Return the number of steps between two perturbations of pbt."""
        return self.scheduler.perturb_every or base.eval.every

    def base_values(self) -> dict[str, Any]:
        """Return the values of the base file with the overrides.

        Defaults and preset values are not filled in.
        """
        return read_yaml(Path(self.base), flatten(self.overrides))


def with_values(values: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested values with the dotted keys of `point` set to its values."""
    tree = copy.deepcopy(dict(values))  # free mappings may have dots or numbers as keys
    for key, value in point.items():
        *sections, last_name = key.split(".")
        section = tree
        for name in sections:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[last_name] = value
    return tree


def check_key(key: str, config_class: type[AnyConfig], *, space: str = "space") -> None:
    """Refuse a key that a search space cannot contain.

    Args:
        key: Dotted key.
        config_class: Class of the run config.
        space: Name of the space, for messages.

    Raises:
        ConfigError: the run config has no such key, the key is a section, or it must be the same
            for all trials.
    """
    keys = known_keys(config_class)
    if key not in keys:
        hint = remedy_for_unknown(key, keys)
        raise ConfigError(f"{space}.{key}: the run config has no such key. {hint}")
    subkeys = [known_key for known_key in keys if known_key.startswith(f"{key}.")]
    if subkeys:
        raise ConfigError(
            f"{space}.{key}: is a section of the run config. Name one of its keys, like "
            f"{space}.{subkeys[0]}."
        )
    if any(key == prefix or key.startswith(f"{prefix}.") for prefix in SET_BY_SWEEP):
        raise ConfigError(f"{space}.{key}: is the same for all trials. Remove it from the space.")


def _test_points(sweep: SweepConfig) -> Iterator[dict[str, Any]]:
    """Yield all combinations of test values, or `MAX_TEST_POINTS` random ones if there are more."""
    values_by_key = {key: domain.test_values for key, domain in sweep.space.items()}
    if math.prod(map(len, values_by_key.values())) <= MAX_TEST_POINTS:
        for values in itertools.product(*values_by_key.values()):
            yield dict(zip(values_by_key, values, strict=True))
        return
    generator = random.Random(0)
    for _ in range(MAX_TEST_POINTS):
        yield {key: generator.choice(values) for key, values in values_by_key.items()}


def _check_metrics(sweep: SweepConfig, trial: AnyConfig, point_label: str) -> None:
    for metric in (*sweep.metric, *(constraint.metric for constraint in sweep.constraint)):
        if metric.startswith("eval/") and not trial.measures_held_out:
            raise ConfigError(
                f"metric ({metric}): the base config has no evaluation. Set eval.prompts in "
                f"{sweep.base}, or choose a metric of the rollouts like rollout/score_mean."
            )
        if metric == "eval/score_mean" and not trial.needs_engine:
            raise ConfigError(
                f"metric ({metric}): answers to held-out prompts are scored by eval.function, "
                f"but {sweep.base} has none. Set eval.function and eval.prompts there, or choose "
                "the metric eval/loss with mode min."
            )
        coef = sweep.space.get("ppo.kl.coef")
        is_end_of_range = (
            coef is not None and coef.kind == "uniform"
        )  # a coefficient of 0 is then only the end of the range, which is never drawn
        has_kl = isinstance(trial, PPOConfig) and trial.ppo.needs_reference
        if metric.startswith("kl/") and not has_kl and not is_end_of_range:
            raise ConfigError(
                f"metric ({metric}): a trial with {point_label} has no reference model, so there "
                "is no KL to it. Choose another metric, or a ppo.kl.coef above 0 for all trials."
            )


def _check_stop(trial: AnyConfig, point_label: str) -> None:
    for key in ("at", "patience", "after_s"):
        value = getattr(trial.stop, key)
        if value is not None:
            raise ConfigError(
                f"stop.{key} ({value:g}): trials are compared at the same step, but one with "
                f"{point_label} would end at another step. Set overrides.stop.{key} to null; a "
                "scheduler stops the worse trials, and a sweep that was stopped with Ctrl-C can "
                "be resumed."
            )


def _check_examples(sweep: SweepConfig, base: PolicyExamplesConfig | RewardModelConfig) -> None:
    if base.num_epochs is not None:
        raise ConfigError(
            f"num_epochs ({base.num_epochs:g}): trials are compared step by step. Set "
            f"overrides.num_steps, and overrides.num_epochs to null."
        )
    if sweep.share and sweep.share != "auto":
        raise ConfigError(
            f"share ({list(sweep.share)}): trials of the recipe {base.recipe} do not train on "
            "samples, so nothing can be shared. Remove share."
        )


def _check_sharing(sweep: SweepConfig, base: AnyConfig) -> None:
    for role in () if sweep.share == "auto" else sweep.share:
        if base.placement.group_of(role) == "dedicated":
            raise ConfigError(
                f"share ({list(sweep.share)}): dedicated roles (placement.mode) cannot be "
                f"shared, because each trial has its own. Leave {role} out, or set "
                "overrides.placement.mode to colocated."
            )


def _check_pbt(sweep: SweepConfig, base: AnyConfig) -> None:
    if sweep.scheduler.kind != "pbt":
        return
    for key in sweep.space:
        if f"{key}.".startswith(_FIXED_BY_CHECKPOINT):
            raise ConfigError(
                f"space ({key}): pbt changes values while a trial runs, but a checkpoint fits "
                f"only one model and one optimizer. Leave {key} out, or use another scheduler."
            )
    is_adaptive = isinstance(base, PPOConfig) and base.ppo.kl.controller == "adaptive"
    if "ppo.kl.coef" in sweep.space and is_adaptive:
        raise ConfigError(
            "space (ppo.kl.coef): the adaptive controller sets it, starting from the value of "
            "the copied trial. Search ppo.kl.target instead, or set overrides.ppo.kl.controller "
            "to fixed."
        )
    every, saved_every = sweep.perturb_every(base), base.checkpoint.every
    if any(metric.startswith("eval/") for metric in sweep.metric) and every % base.eval.every:
        raise ConfigError(
            f"scheduler.perturb_every ({every}): trials are judged by {sweep.metric[0]}, which is "
            f"measured every {base.eval.every} steps (eval.every). Set it to a multiple of that."
        )
    if every != saved_every:
        raise ConfigError(
            f"checkpoint.every ({saved_every}): pbt copies checkpoints every {every} steps "
            "(scheduler.perturb_every, else eval.every of the base), but newer checkpoints "
            "would replace them before they are copied. Set overrides.checkpoint.every to "
            f"{every}."
        )
