"""`raypo serve`: a policy behind OpenAI's protocol."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from raypo.cli.evaluate import policy_of
from raypo.cli.exit_status import exit_status, tell
from raypo.cli.serve_reward import token_for

TOKEN_VARIABLE = "RAYPO_API_KEY"
"""Environment variable of the key that clients must bring."""


@exit_status()
def serve(
    model: Annotated[str, typer.Argument(help="A run's folder, a Hugging Face folder or hub id.")],
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="That clients ask for; default: the end of the path.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; default: the run's, else float32.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and response; default: the model's, to 8192."),
    ] = None,
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(min=0.01, help="KV cache; default: a fitting size on CPU, all on GPU."),
    ] = None,
    gpu_memory_fraction: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory.")
    ] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
) -> None:
    """Serve a policy to OpenAI clients until Ctrl-C: chat, completions, streams, tools."""
    from raypo.checks import check_model
    from raypo.config import ConfigError, EngineSection, load_run_config

    token = token_for(host, TOKEN_VARIABLE, ", which clients bring as their API key")
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"--dtype ({dtype}): must be float32 or bfloat16. Choose one.")
    policy, run_config = policy_of(model)
    check_model("MODEL", policy)
    section = EngineSection(
        kv_cache_gb=kv_cache_gb,
        gpu_memory_fraction=gpu_memory_fraction,
        tensor_parallel=tensor_parallel,
    )
    of_run = getattr(load_run_config(run_config), "model", None) if run_config else None
    usual_dtype = getattr(of_run, "dtype", "float32")
    for variable, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("VLLM_LOGGING_LEVEL", "ERROR")):
        os.environ.setdefault(variable, value)
    from raypo.endpoint.app import make_app
    from raypo.endpoint.local import served_model
    from raypo.rewards.server import serve as serve_app

    tell("starting the engine")
    try:
        with served_model(
            policy,
            name=name or Path(model).name,
            section=section,
            dtype=dtype or usual_dtype,
            max_model_len=max_model_len,
        ) as (served, engine):

            def ready(address: str) -> None:
                typer.echo(f"raypo: serves {served.name} at {address}/v1")

            app = make_app(served, token=token, check=engine.check_health)
            serve_app(app, host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")
