"""The `raypo` command. On wrong input it exits with status 2, before heavy imports."""

from __future__ import annotations

import typer

from raypo.cli.doctor import doctor
from raypo.cli.evaluate import evaluate, export
from raypo.cli.explain import explain
from raypo.cli.init import init
from raypo.cli.monitor import monitor
from raypo.cli.plan import plan
from raypo.cli.report import report
from raypo.cli.run_status import status
from raypo.cli.serve import serve
from raypo.cli.serve_reward import serve_reward
from raypo.cli.show import show
from raypo.cli.sweep import sweep
from raypo.cli.timeline import timeline
from raypo.cli.train import train
from raypo.cli.try_reward import try_reward

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Align language models with PPO on Ray Train, vLLM and DeepSpeed.",
)
app.command()(init)
app.command()(train)
app.command()(doctor)
app.command("eval")(evaluate)
app.command("config")(explain)
app.command("try-reward")(try_reward)
for command in (export, plan, serve, serve_reward, sweep, report, show, status, timeline, monitor):
    app.command()(command)


def main() -> None:
    """Run the command and end the process with its exit status."""
    app()
