"""`raypo try-reward`: call a run's reward functions on a few rows, without loading a model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raypo.cli.exit_status import exit_status

if TYPE_CHECKING:
    from raypo.config import OnlineConfig, PolicyExamplesConfig
    from raypo.rewards.scoring import RewardFunction
    from raypo.rollout.reward_trial import Trial


@exit_status()
def try_reward(
    config: Annotated[Path, typer.Argument(help="A run config (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like reward.processes=4")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each source.")] = 3,
    servers: Annotated[
        bool, typer.Option("--servers", help="Also call reward.url and the judge's server.")
    ] = False,
) -> None:
    """Call the run's reward functions on its first rows, and print scores, parts and times.

    Each row gets its right answer, an empty and a wrong text as the response. The functions are
    called as the run calls them, but no model is loaded and Ray is not started.
    """
    from raypo.checks.function_checks import check_functions
    from raypo.checks.model_checks import check_model
    from raypo.config import ConfigError, OnlineConfig, PolicyExamplesConfig, load_run_config
    from raypo.custom.loader import load_function

    run = load_run_config(config, overrides)
    if not isinstance(run, OnlineConfig | PolicyExamplesConfig):
        raise ConfigError(f"recipe ({run.recipe}): has no reward function. There is none to try.")
    train_function = run.reward.function if isinstance(run, OnlineConfig) else None
    check_functions(run, common=train_function)
    if train_function is not None:
        load_function(train_function, key="reward.function")
    check_model("model.policy", run.model.policy)
    has_function = False
    with _functions(run, servers=servers) as functions:
        for key, name, function in functions:
            has_function = True
            _try(run, key, name, function, rows)
    if not has_function:
        raise ConfigError(
            "reward.function (None): there is no function to try. Set reward.function, "
            "data.prompts[].function or eval.function; --servers calls reward.url and "
            "reward.judge.url. Reward models, judges of the run and the scores of episodes need "
            "the whole run."
        )


@contextmanager
def _functions(
    run: OnlineConfig | PolicyExamplesConfig, *, servers: bool
) -> Iterator[list[tuple[str, str, RewardFunction]]]:
    """Open the functions of a run. Yield each with the key of its prompts and its name."""
    from raypo.config import OnlineConfig, functions_of
    from raypo.rewards.functions import (
        close_function,
        evaluation_function,
        open_function,
        open_servers,
    )

    trained: RewardFunction | None = None
    functions: list[tuple[str, str, RewardFunction]] = []
    try:
        if isinstance(run, OnlineConfig) and not run.rollout.is_episodic:
            trained = open_function(run.reward, None, functions_of(run.data.prompts))
            if trained is not None:
                functions.append(("data.prompts", str(trained), trained))
            remote = open_servers(run.reward) if servers else {}
            functions += [("data.prompts", f"reward.{key}", fn) for key, fn in remote.items()]
        held_out = evaluation_function(run.eval, trained) if run.eval.prompts else None
        if held_out is not None and held_out is not trained:
            functions.append(("eval.prompts", str(held_out), held_out))
        yield functions
    finally:
        close_function(trained)


def _try(
    run: OnlineConfig | PolicyExamplesConfig,
    key: str,
    name: str,
    function: RewardFunction,
    rows: int,
) -> None:
    # DeepSpeed, which transformers imports, would print that it has found no accelerator.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from raypo.data.prompts import load_prompts
    from raypo.models.loading import load_tokenizer  # imports torch
    from raypo.rewards.labels import label_checks
    from raypo.rollout.image_reader import image_reader
    from raypo.rollout.reward_trial import first_of_each, trials

    tokenizer = load_tokenizer(run.model.policy)
    sources = run.eval.prompts if key == "eval.prompts" else run.data.prompts
    section = run.data.model_copy(update={"prompts": sources})
    loaded = load_prompts(
        section,
        tokenizer,
        key=key,
        label_checks=label_checks(run, key),
        most=rows,
        reader=cache(partial(image_reader, run.model.policy)),
    )
    typer.echo(f"{key}, scored by {name}")
    trial_results = list(trials(function, first_of_each(loaded, rows), tokenizer))
    for line in _result_lines(trial_results):
        typer.echo(line)


def _result_lines(trial_results: Sequence[Trial]) -> Iterator[str]:
    responses_by_row: dict[int, list[tuple[str, Any, float]]] = {}
    for trial in trial_results:
        for rollout, score in zip(trial.rollouts, trial.scores, strict=True):
            responses_by_row.setdefault(rollout.group_index, []).append(
                (trial.kind, rollout, score)
            )
    for responses in responses_by_row.values():
        _, rollout, _ = responses[0]
        source = f" of {rollout.data_source}" if rollout.data_source else ""
        yield f"  row {rollout.prompt_index}{source}: {_short(rollout.prompt, 100)}"
        for kind, response, score in responses:
            yield f"    {kind}  {_score_text(score)}  {_short(response.response, 60)}"
    for trial in trial_results:
        count = len(trial.rollouts)
        yield (
            f"  {trial.kind}: {trial.seconds:.3g} s for a call with {count} responses, "
            f"{1000 * trial.seconds / count:.3g} ms each"
        )
    scores = {trial.kind: [float(score) for score in trial.scores] for trial in trial_results}
    if "right" not in scores:
        yield "  No row has a known answer (data.label_key), so no right response was tried."
    elif max(scores["right"]) <= min(scores["wrong"]):
        yield (
            "  Note: no right answer scores higher than a wrong one. Look at what the function "
            "expects in a response."
        )


def _score_text(score: float) -> str:
    from raypo.rewards.scoring import FailedScore, parts_of, texts_of

    reason = f" ({score.reason})" if isinstance(score, FailedScore) else ""
    total = f"score {score:.4g}" if math.isfinite(score) else f"no score{reason}"
    parts = [f"{name} {value:.4g}" for name, value in parts_of(score).items()]
    return "  ".join(
        [total, *parts, *(f"{k}: {_short(text, 60)}" for k, text in texts_of(score).items())]
    )


def _short(text: str, length: int) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= length else f"{quoted[: length - 3]}..."
