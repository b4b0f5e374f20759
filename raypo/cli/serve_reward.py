"""`raypo serve-reward`: serve a reward function or reward model over HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from raypo.cli.exit_status import exit_status

if TYPE_CHECKING:
    from raypo.rewards.scoring import RewardFunction


@exit_status()
def serve_reward(
    target: Annotated[
        str,
        typer.Argument(
            help="A sequence classifier (Hugging Face folder or hub id), or a reward function: "
            "file.py:name or package.module:name."
        ),
    ],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 picks a free one.")] = 8000,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Dtype of a model.")
    ] = "float32",
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="For a model: maximum number of tokens in a forward pass.")
    ] = 4096,
) -> None:
    """Serve rewards as JSON over HTTP until Ctrl-C; runs use it through reward.url."""
    from raypo.extras import require

    require("serve", "raypo serve-reward")
    from raypo.checks.model_checks import check_model
    from raypo.custom.loader import load_function
    from raypo.rewards.wire import TOKEN_VARIABLE

    token = token_for(host, TOKEN_VARIABLE, " for server and runs")
    is_function = ":" in target and not Path(target).is_dir()
    function: RewardFunction
    if is_function:
        function = load_function(target, key="TARGET")
    else:
        check_model("TARGET", target)
        from raypo.serving.frozen import RewardModel  # imports torch

        model = RewardModel(target, policy=None, dtype=dtype, max_batch_tokens=max_batch_tokens)
        function = model.score
    from raypo.http_server import run_server
    from raypo.rewards.server import make_app

    app = make_app(function, name=target, token=token)

    def ready(address: str) -> None:
        typer.echo(f"raypo: serves {target}; set reward.url to {address}/score")

    try:
        run_server(app, host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")


def token_for(host: str, variable: str, use: str) -> str | None:
    """Return the token in an environment variable, or None if the variable is unset.

    Args:
        host: Interface that the server listens on.
        variable: Name of the environment variable.
        use: Use of the token, for the message.

    Raises:
        ConfigError: other machines can reach the port, but there is no token.
    """
    from raypo.config import ConfigError

    token = os.environ.get(variable)
    if host not in ("127.0.0.1", "::1", "localhost") and not token:
        raise ConfigError(
            f"--host ({host}): anyone who can reach this port could send requests. Set the "
            f"environment variable {variable}{use}, or omit --host."
        )
    return token
