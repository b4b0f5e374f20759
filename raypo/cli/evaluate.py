"""`raypo eval` and `raypo export`: score a trained policy, and copy it out of its run."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from raypo.cli.exit_status import exit_status, tell


@exit_status()
def evaluate(
    model: Annotated[str, typer.Argument(help="A run's folder, a Hugging Face folder or hub id.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, like eval.samples_per_prompt=8")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A ppo, sft or dpo config. Default: the config of the run."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Also write the metrics as JSON.")] = None,
) -> None:
    """Score a policy on held-out prompts: mean, pass@k, by data source."""
    from raypo.config import ConfigError, OnlineConfig, PolicyExamplesConfig, load_run_config
    from raypo.storage.run_files import policy_of

    policy, run_config = policy_of(model)
    source = config or run_config
    if source is None:
        raise ConfigError(
            f"--config: {model} is not a run folder, so a config must name the prompts and the "
            "reward function. Give a run config with an eval section."
        )
    settings = load_run_config(source, overrides)
    if not isinstance(settings, OnlineConfig | PolicyExamplesConfig):
        raise ConfigError(
            f"--config ({source}): recipe {settings.recipe} samples no responses. Give a ppo, sft "
            "or dpo config."
        )
    from raypo.checks.input_checks import check_evaluation
    from raypo.models.loading import check_tokens

    check_evaluation(policy, settings)
    check_tokens(policy, key="MODEL")  # vLLM checks the weights
    if to is not None:
        to.parent.mkdir(parents=True, exist_ok=True)
    for variable, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("VLLM_LOGGING_LEVEL", "ERROR")):
        os.environ.setdefault(variable, value)
    from raypo.rollout.standalone_evaluation import evaluate_model
    from raypo.storage.folder import finite
    from raypo.tracking.logs import log_to_file

    # In a shared folder, another user could make a guessable name a link to any file of this user.
    file, log = tempfile.mkstemp(prefix="raypo-eval-", suffix=".log")
    os.close(file)
    log_to_file(log)
    results = evaluate_model(policy, settings, tell)
    _print(results)
    if to is not None:
        content = finite({"model": policy, "results": results})
        to.write_text(json.dumps(content, indent=2) + "\n")


@exit_status()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    to: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a LoRA run: write only the adapter, for peft.")
    ] = False,
) -> None:
    """Copy a run's trained model, with any LoRA adapter merged, as a Hugging Face folder."""
    import shutil

    from raypo.config import ConfigError

    names = ("adapter",) if adapter else ("policy", "reward_model")
    folders = [run / name for name in names if (run / name).is_dir()]
    if not folders and adapter:
        raise ConfigError(
            f"--adapter: there is no adapter/ in {run}. Give the folder of a run with model.lora "
            "that has reached a checkpoint, or omit --adapter."
        )
    if not folders:
        raise ConfigError(
            f"{run}: there is no policy/ or reward_model/ in it. Give the folder of a run that "
            f"has reached a checkpoint."
        )
    if to.exists():
        raise ConfigError(
            f"--to ({to}): this path exists already. Name a new folder, or remove this one."
        )
    shutil.copytree(folders[0], to)
    typer.echo(f"raypo: {folders[0]} -> {to}")


def _print(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = dict.fromkeys(name for metrics in results.values() for name in metrics)
    del names["eval/prompts"]
    table = Table("source", "prompts", *(name.removeprefix("eval/") for name in names))
    for source, metrics in results.items():
        cells = [f"{metrics[name]:.4g}" if name in metrics else "" for name in names]
        table.add_row(source, f"{metrics['eval/prompts']:.0f}", *cells)
    Console().print(table)
