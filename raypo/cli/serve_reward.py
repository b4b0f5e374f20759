"""`raypo serve-reward`: a reward function or model behind a port."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from raypo.cli.status import exit_status

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@exit_status()
def serve_reward(
    target: Annotated[
        str, typer.Argument(help="file.py:name or package.module:name of a reward function.")
    ],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
) -> None:
    """Serve rewards as JSON over HTTP until Ctrl-C; runs ask it by reward.url."""
    from raypo.config import ConfigError
    from raypo.rewards.loader import check_function
    from raypo.rewards.wire import TOKEN_VARIABLE

    token = os.environ.get(TOKEN_VARIABLE)
    if host not in LOOPBACK and not token:
        raise ConfigError(
            f"--host ({host}): whoever reaches this port could send work. Set the environment "
            f"variable {TOKEN_VARIABLE} for server and runs, or leave --host out."
        )
    check_function(target, key="TARGET")
    from raypo.rewards.server import make_app, serve

    app = make_app(_function(target), name=target, token=token)

    def ready(address: str) -> None:
        typer.echo(f"raypo: serves {target}; set reward.url to {address}/score")

    try:
        serve(app, host=host, port=port, ready=ready)
    except OSError as error:
        raise ConfigError(
            f"--port ({port}): cannot be listened on at {host} ({error.strerror}). Choose another."
        ) from None


def _function(target: str) -> Any:
    from raypo.rewards.loader import load_function

    return load_function(target, key="TARGET")
