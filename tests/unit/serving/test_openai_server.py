"""vLLM's server as raypo starts it: its arguments, and who may ask."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from raypo.config import EngineSection
from raypo.serving import openai_server
from raypo.serving.openai_server import RequireKey, flags, server_arguments, tool_parser
from raypo.serving.vllm_settings import SCHEDULER, engine_arguments
from tests.tiny import tiny_policy, tiny_tokenizer


def test_arguments_become_vllms_flags() -> None:
    arguments = {
        "max_model_len": -1,
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "hf_overrides": {"rope_theta": 1e6},
        "logits_processors": ["a:b", "c:d"],
        "quantization": None,
    }
    assert list(flags(arguments)) == [
        "--max-model-len=-1",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        '--hf-overrides={"rope_theta": 1000000.0}',
        *("--logits-processors", "a:b", "c:d"),
    ]


def test_the_server_streams_under_vllms_own_scheduler(tmp_path: Path) -> None:
    """raypo's scheduler returns a response when it has ended."""
    folder, section = str(tiny_policy(tmp_path)), EngineSection()
    given = server_arguments(folder, section, dtype="float32", max_model_len=64, device="cpu")
    shape: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "seed": 0, "device": "cpu"}
    of_engine = engine_arguments(folder, section, **shape)
    assert of_engine["scheduler_cls"] == SCHEDULER
    assert "scheduler_cls" not in given


def test_the_tokenizer_says_how_tool_calls_are_written(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path)
    assert tool_parser(str(tmp_path)) == "hermes"
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<unk>", "<|python_tag|>"))
    assert tool_parser(str(tmp_path)) == "llama3_json"
    assert tool_parser("organisation/model") == "hermes"


@pytest.mark.parametrize("key", ["", "Bearer", "Bearer wrong", "wrong", "Bearer right"])
@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/metrics", "/health"])
def test_only_health_is_answered_without_the_key(
    monkeypatch: pytest.MonkeyPatch, key: str, path: str
) -> None:
    monkeypatch.setenv(openai_server.KEY_VARIABLE, "right")
    app = RequireKey(PlainTextResponse("answered"))

    async def ask() -> httpx.Response:
        transport: Any = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers={"Authorization": key})

    answer = asyncio.run(ask())
    if path == "/health" or key == "Bearer right":
        assert (answer.status_code, answer.text) == (200, "answered")
    else:
        assert answer.status_code == 401
        assert answer.json()["error"]["message"] == "the API key is missing or wrong"
