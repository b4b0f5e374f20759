"""Config of a trained policy for Ray Serve LLM, and a server for one model."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from raypo.config import ConfigError, EngineSection, load_run_config
from raypo.http_server import address
from raypo.serving.openai_server import server_arguments
from raypo.serving.vllm_settings import DEFAULTS, EAGER
from raypo.storage.run_files import policy_of

if TYPE_CHECKING:
    from ray.serve.llm import LLMConfig

_OF_RAY = ("model", "distributed_executor_backend")
"""Arguments of vLLM that Ray Serve LLM sets itself and refuses from others."""


def llm_config(
    model: str | Path,
    *,
    name: str | None = None,
    use_gpu: bool | None = None,
    engine_kwargs: dict[str, Any] | None = None,
    **fields: Any,
) -> LLMConfig:
    """Return Ray Serve LLM's config of a policy, with the settings of `raypo serve`.

    Args:
        model: Folder of a run, of its best step, or of a model; or a hub id. A run with LoRA is
            served with its adapter merged.
        name: Model name that clients request. None means the last component of `model`.
        use_gpu: Whether replicas run on GPUs. None means that they do if this machine has one.
        engine_kwargs: Arguments of vLLM, which override raypo's.
        fields: Other fields of `LLMConfig`, like `deployment_config` or `accelerator_type`.

    Raises:
        ConfigError: Ray Serve LLM is not installed.
    """
    try:
        from ray.serve.llm import LLMConfig
    except ImportError as error:
        raise ConfigError(
            f"Ray Serve LLM: cannot be imported here ({str(error).splitlines()[0]}). pip install "
            f"'ray[serve]' beside raypo's cpu or gpu extra, on every node."
        ) from None
    policy, run_config = policy_of(str(model))
    run = load_run_config(run_config) if run_config else None
    of_run = getattr(run, "model", None)
    template_kwargs = getattr(getattr(run, "data", None), "chat_template_kwargs", {})
    device = "cuda" if (torch.cuda.is_available() if use_gpu is None else use_gpu) else "cpu"
    arguments = server_arguments(
        policy,
        EngineSection(gpu_memory_fraction=0.9),
        dtype=getattr(of_run, "dtype", "float32"),
        max_model_len=None,
        device=device,
    )
    variables = DEFAULTS | (EAGER if arguments.get("enforce_eager") else {})
    values: dict[str, Any] = {
        "model_loading_config": {"model_id": name or Path(model).name, "model_source": policy},
        "engine_kwargs": {k: v for k, v in arguments.items() if k not in _OF_RAY}
        | ({"default_chat_template_kwargs": template_kwargs} if template_kwargs else {})
        | (engine_kwargs or {}),
        "deployment_config": {"num_replicas": 1},
        "runtime_env": {"env_vars": {k: os.environ.get(k, v) for k, v in variables.items()}},
    }
    if device == "cpu":
        values["accelerator_config"] = {"kind": "cpu"}
    return LLMConfig(**(values | fields))


def serve_on_ray(config: LLMConfig, *, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve a model with Ray Serve on the connected cluster until Ctrl-C, then shut Ray Serve down.

    Args:
        config: Config of the model.
        host: Interface to listen on.
        port: Port to listen on.
        ready: Callback `(address)`, called once the server is ready.

    Raises:
        ConfigError: Ray Serve runs on the cluster already, with its own addresses.
    """
    from ray import serve
    from ray.serve.llm import build_openai_app

    status = serve.status()
    if status.proxies or status.applications:  # its proxies may listen to other machines
        raise ConfigError(
            "--ray: this cluster already serves applications "
            f"({', '.join(status.applications) or 'nothing'}). Add the model there: "
            "serve.run(build_openai_app({'llm_configs': [raypo.llm_config(...)]}), name=..., "
            "route_prefix=...)."
        )
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    try:
        # By default the ingress reserves a core, which a machine of two cores lacks: the engine and
        # its replica reserve one each. Ray Serve would wait for it without a message.
        ingress = {"ray_actor_options": {"num_cpus": 0}}
        app = build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
        serve.run(app, name="raypo", route_prefix="/")
        ready(address(host, port))
        threading.Event().wait()
    finally:
        serve.shutdown()
