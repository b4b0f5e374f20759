"""`raypo serve`: serve a policy with an OpenAI-compatible API."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from raypo.cli.exit_status import exit_status, tell
from raypo.cli.serve_reward import token_for


@exit_status()
def serve(
    model: Annotated[str, typer.Argument(help="A run's folder, a Hugging Face folder or hub id.")],
    further: Annotated[
        list[str] | None,
        typer.Argument(
            help="After `--`: arguments of vLLM's server, which override the options here, except "
            "the host and the port."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0 picks a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Model name for clients. Default: the end of the path.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Default: the dtype of the run, else float32."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and response; default: what there is room for."),
    ] = None,
    kv_cache_gb: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Size of the KV cache. Default: 1 GB on CPU, the remaining share on GPU.",
        ),
    ] = None,
    gpu_memory_fraction: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of a GPU's memory.")
    ] = 0.9,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs to shard the model over.")] = 1,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Use Ray Serve, on the cluster of RAY_ADDRESS or a new one."),
    ] = False,
) -> None:
    """Serve a policy to OpenAI clients with vLLM's server or with Ray Serve, until Ctrl-C."""
    from raypo.extras import require

    require("serve", "raypo serve")
    from raypo.checks.model_checks import check_model
    from raypo.config import EngineSection, load_run_config
    from raypo.http_server import listen
    from raypo.serving.vllm_arguments import with_head_dtype
    from raypo.storage.run_files import policy_of

    if ray:
        _check_ray_options(host, further or ())
    _check_vllm_arguments(further or ())
    token_for(host, "RAYPO_API_KEY", ", which clients send as their API key")
    policy, run_config = policy_of(model)
    check_model("MODEL", policy)
    section = EngineSection(
        kv_cache_gb=kv_cache_gb,
        gpu_memory_fraction=gpu_memory_fraction,
        tensor_parallel=tensor_parallel,
    )
    run = load_run_config(run_config) if run_config else None
    model_section = getattr(run, "model", None)
    template_kwargs = getattr(getattr(run, "data", None), "chat_template_kwargs", {})
    with listen(
        host, port
    ) as server_socket:  # fail early: vLLM would notice a busy port after 20 s
        port = server_socket.getsockname()[1]
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if ray:
        engine_options = {
            "dtype": dtype,
            "max_model_len": max_model_len,
            "kv_cache_memory_bytes": kv_cache_gb and int(kv_cache_gb * 1e9),
            "gpu_memory_utilization": gpu_memory_fraction,
            "tensor_parallel_size": tensor_parallel,
        }
        kwargs = {key: value for key, value in engine_options.items() if value is not None}
        _serve_on_ray(model, name, kwargs, host, port)
        return
    from raypo.serving.openai_server import run_openai_server

    name = name or Path(model).name
    tell("starting vLLM's server")
    run_openai_server(
        policy,
        name=name,
        section=with_head_dtype(section, getattr(model_section, "head_dtype", "model")),
        dtype=dtype or getattr(model_section, "dtype", "float32"),
        max_model_len=max_model_len,
        template_kwargs=template_kwargs,
        host=host,
        port=port,
        further=further or (),
        ready=lambda url: typer.echo(f"raypo: serves {name} at {url}/v1"),
    )


_RESERVED_OPTIONS = {
    "--host": "--host HOST before `--`",
    "--port": "--port PORT before `--`",
    "--uds": "--host HOST and --port PORT before `--`",
    "--api-key": "the environment variable RAYPO_API_KEY, which protects all paths but /health",
}
"""Arguments of vLLM's server that raypo sets itself, and the options to use in their place."""


def _check_vllm_arguments(further: Sequence[str]) -> None:
    """Refuse arguments that change the server's address or its access control.

    raypo's check for an API key, and its wait for the server, read only raypo's own options.
    """
    from raypo.config import ConfigError

    for option in further:
        name = option.partition("=")[0].replace("_", "-")  # vLLM accepts underscores too
        for reserved, remedy in _RESERVED_OPTIONS.items():
            # argparse accepts any unambiguous prefix of a name.
            if len(name) > len("--") and reserved.startswith(name):
                raise ConfigError(
                    f"-- ({option}): raypo itself sets where vLLM's server listens and which API "
                    f"key it requires. Use {remedy}."
                )


def _check_ray_options(host: str, further: Sequence[str]) -> None:
    """Refuse options that `--ray` does not support: API keys, and arguments of vLLM's server."""
    from raypo.config import ConfigError

    if host not in ("127.0.0.1", "::1", "localhost") or os.environ.get("RAYPO_API_KEY"):
        raise ConfigError(
            f"--ray (--host {host}): Ray Serve does not check API keys. Omit --host and "
            "RAYPO_API_KEY and put a proxy that checks keys in front, or omit --ray."
        )
    if further:
        raise ConfigError(
            f"-- ({' '.join(further)}): --ray passes no command line to vLLM. Give these to "
            "raypo.llm_config(engine_kwargs=...) in a script, or omit --ray."
        )


def _serve_on_ray(
    model: str, name: str | None, engine_kwargs: dict[str, Any], host: str, port: int
) -> None:
    import signal

    import ray

    from raypo.cluster.connect import connect
    from raypo.config import ClusterSection
    from raypo.serving.ray_serve import llm_config, serve_on_ray

    connect(ClusterSection())
    # Without this handler, SIGTERM would leave Ray Serve running on an existing cluster. It is set
    # after `connect`, because Ray installs a handler of its own, which aborts the process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    has_gpus = bool(ray.cluster_resources().get("GPU"))
    config = llm_config(model, name=name, use_gpu=has_gpus, engine_kwargs=engine_kwargs)
    tell("starting Ray Serve")

    def ready(address: str) -> None:
        typer.echo(f"raypo: serves {config.model_id} at {address}/v1")

    try:
        serve_on_ray(config, host=host, port=port, ready=ready)
    except KeyboardInterrupt:
        typer.echo("raypo: ended.")
    finally:
        ray.shutdown()
