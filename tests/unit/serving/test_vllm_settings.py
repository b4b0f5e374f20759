from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from raypo.config import ConfigError, EngineSection, SpeculationSection
from raypo.serving import vllm_settings
from raypo.serving.engine_sizes import cpu_sequence_bytes, default_cpu_kv_bytes, engine_sequences
from raypo.serving.vllm_settings import (
    check_version,
    engine_arguments,
    prepare_environment,
    start_llm,
)
from tests.tiny import tiny_policy

GIB = 1024**3


@pytest.mark.parametrize("version", ["0.23.0", "0.32.0", "0.32.1rc2+cpu", "0.27.0.dev5"])
def test_supported_versions(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.22.1", "0.33.0", "1.0.0", "0.9.2"])
def test_unsupported_versions_are_named(version: str) -> None:
    with pytest.raises(
        RuntimeError, match=rf"vLLM {version} is installed, but .* 0\.23 to 0\.32"
    ) as caught:
        check_version(version)
    gpu, cpu = (Requirement(text) for text in re.findall(r'"([^"]+)"', str(caught.value)))
    assert version not in gpu.specifier
    assert {"0.23.0", "0.32.9"} <= set(gpu.specifier.filter(["0.23.0", "0.32.9", "0.33.0"]))
    assert "0.32.0" in cpu.specifier


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("WorkerProc initialization failed due to an exception in a background process. See stack "
         "trace for root cause.", r"one of vLLM's processes did not start.*\(Worker_"),
        ("no room for the KV cache", "^no room for the KV cache$"),
    ],
)  # fmt: skip
def test_where_the_reason_of_another_process_stands_is_told(monkeypatch, said: str, told: str):
    def fails() -> None:
        raise RuntimeError(said)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0", LLM=fails))
    monkeypatch.setattr(vllm_settings, "prepare_environment", lambda **_: None)
    with pytest.raises(RuntimeError, match=told):
        start_llm({})


def test_a_sharded_engine_asks_for_shared_memory_before_vllm_is_imported(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    monkeypatch.setattr(vllm_settings, "import_vllm", lambda: pytest.fail("too late"))
    with pytest.raises(ConfigError, match=r"^/dev/shm \(0\.0671 GB.*--shm-size"):
        start_llm({"tensor_parallel_size": 2})


def arguments(folder: str, section: EngineSection, device: str = "cpu") -> dict:
    return engine_arguments(
        folder, section, dtype="float32", max_model_len=300, seed=1, device=device
    )


def test_arguments_come_from_the_section(tmp_path) -> None:
    folder = str(tiny_policy(tmp_path))

    cpu = arguments(folder, EngineSection(prefix_caching=False, kv_cache_gb=0.25))
    assert cpu["kv_cache_memory_bytes"] == 250_000_000
    assert not cpu["enable_prefix_caching"]
    assert cpu["enforce_eager"]
    assert not cpu["enable_chunked_prefill"]

    gpu = arguments(folder, EngineSection(gpu_memory_fraction=0.3), device="cuda")
    assert gpu["gpu_memory_utilization"] == 0.3
    sized = arguments(folder, EngineSection(kv_cache_gb=0.25), device="cuda")
    assert sized["kv_cache_memory_bytes"] == 250_000_000
    # vLLM refuses to start if this share of the GPU is not free; the learner loads meanwhile.
    assert sized["gpu_memory_utilization"] == 0.01
    assert "kv_cache_memory_bytes" not in gpu
    assert not {"enforce_eager", "enable_chunked_prefill"} & gpu.keys()


def test_a_draft_model_has_weights_and_a_cache_of_its_own(tmp_path) -> None:
    folder = str(tiny_policy(tmp_path / "policy"))
    drafter = str(tiny_policy(tmp_path / "drafter"))  # as large as the policy
    speculation = SpeculationSection(kind="model", model=drafter, num_tokens=3)
    shape: dict[str, Any] = {"dtype": "float32", "max_model_len": 20_000, "seed": 1}
    shape |= {"device": "cpu"}
    drafted = engine_arguments(folder, EngineSection(speculation=speculation), **shape)
    plain = engine_arguments(folder, EngineSection(), **shape)
    assert drafted["kv_cache_memory_bytes"] == 2 * plain["kv_cache_memory_bytes"]
    assert drafted["load_format"] == "dummy"
    speculative = drafted["speculative_config"]
    assert speculative["draft_load_config"] == {"load_format": "auto"}
    assert (speculative["model"], speculative["num_speculative_tokens"]) == (drafter, 3)
    assert "speculative_config" not in plain


def test_as_many_sequences_at_a_time_as_the_plan_counts_with(tmp_path) -> None:
    assert arguments(str(tiny_policy(tmp_path)), EngineSection())["max_num_seqs"] == 256
    assert [engine_sequences(size) for size in (None, 24 * GIB, 70 * GIB)] == [256, 256, 1024]


def test_no_more_sequences_than_there_are_requests(tmp_path) -> None:
    folder, section = str(tiny_policy(tmp_path)), EngineSection()
    shape: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "seed": 1}
    few = engine_arguments(
        folder, section, **shape, device="cuda", whole_batches=True, max_requests=40
    )
    assert few["max_num_seqs"] == 40
    assert few["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert "enforce_eager" not in few
    recording = engine_arguments(
        folder, section, **shape, device="cuda", whole_batches=True, records_experts=True
    )
    assert recording["enforce_eager"]  # graphs would not call the functions that record
    assert "compilation_config" not in recording
    many = engine_arguments(folder, section, **shape, device="cpu", max_requests=5000)
    assert many["max_num_seqs"] == 256
    chosen = EngineSection(extra={"max_num_seqs": 100})
    users = engine_arguments(folder, chosen, **shape, device="cpu", max_requests=40)
    assert users["max_num_seqs"] == 100


def test_extra_wins(tmp_path) -> None:
    section = EngineSection(extra={"enforce_eager": False, "max_num_seqs": 3})
    chosen = arguments(str(tiny_policy(tmp_path)), section)
    assert (chosen["enforce_eager"], chosen["max_num_seqs"]) == (False, 3)
    shape: dict[str, Any] = {"dtype": "float32", "max_model_len": 300, "seed": 1, "device": "cpu"}
    beside = engine_arguments(chosen["model"], section, **shape, probes=2)
    assert beside == chosen | {"max_num_seqs": 5}


def test_default_kv_cache_holds_one_sequence_at_least(tmp_path) -> None:
    half_a_gib = 1 << 29
    assert arguments(str(tiny_policy(tmp_path)), EngineSection())["kv_cache_memory_bytes"] == (
        half_a_gib
    )
    assert default_cpu_kv_bytes(46_080, 384) == 32 * 512 * 46_080  # a batch of SmolLM2-135M
    assert default_cpu_kv_bytes(46_080, 8064) == 1 << 31  # no more than that unasked
    assert default_cpu_kv_bytes(524_288, 8064) == 8192 * 524_288  # but one sequence in any case
    for length in (16, 5_000, 400_000):
        assert default_cpu_kv_bytes(46_080, length) >= cpu_sequence_bytes(46_080, length)


def test_vllm_is_told_not_to_look_for_flashinfers_sampler_unless_the_user_wants_it(
    monkeypatch,
) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    prepare_environment(eager=False)
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    prepare_environment(eager=False)
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_what_the_user_says_about_logging_stays(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")

    prepare_environment(eager=False)

    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
