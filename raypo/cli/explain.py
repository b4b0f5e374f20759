"""`raypo config`: print the meaning of config keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from raypo.cli.exit_status import exit_status

if TYPE_CHECKING:
    from raypo.config.key_reference import Key


@exit_status()
def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key like ppo.kl.coef, a section or a preset. Default: the most important keys."
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Recipe whose keys are meant: ppo, sft, dpo, ..., or sweep.")
    ] = "ppo",
) -> None:
    """Print a key's meaning, allowed values and default, as in docs/configuration.md."""
    from raypo.config import PRESETS, RECIPES, ConfigError
    from raypo.config.key_reference import FIRST_KEYS, preset_text, sections_below
    from raypo.config.key_reference import explain as keys_at
    from raypo.config.sweep_config import SweepConfig

    roots = {**RECIPES, "sweep": SweepConfig}
    if recipe not in roots:
        raise ConfigError(f"--recipe ({recipe}): must be one of {', '.join(roots)}.")
    root = roots[recipe]
    key = key and key.partition("=")[0].strip(". ")  # accept an override, key=value
    if key in PRESETS:
        typer.echo(f"ppo.preset: {key} sets these keys of the section ppo\n  {preset_text(key)}")
        return
    if key is None and recipe == "ppo":
        entries = [keys_at(key, root)[0] for key in FIRST_KEYS]
    else:
        entries = keys_at(key or "", root)
    for entry in entries:
        _print(entry)
    if key == "ppo.preset":
        for name in PRESETS:
            typer.echo(f"  {name}: {preset_text(name)}")
    if sections := sections_below(root, key or ""):
        typer.echo(f"Sections: {', '.join(sections)}")


def _print(key: Key) -> None:
    from rich.console import Console
    from rich.text import Text

    default = "required" if key.default is None else f"default {key.default}"
    console = Console(soft_wrap=False, highlight=False)
    console.print(Text(key.name, style="bold"), Text(f"  {key.values.replace('`', '')}; {default}"))
    console.print(Text(key.meaning), "", sep="\n")
