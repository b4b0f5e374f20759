"""What `rollout.engine.extra` may hold, against the vLLM that is installed."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from raypo.config import ConfigError, EngineSection, PPOConfig
from raypo.config.fields import known_keys
from raypo.serving import vllm_arguments
from raypo.serving.vllm_arguments import (
    FIXED,
    SAID_BY_REQUESTS,
    SET_BY,
    check_extra,
    check_head_dtype,
    check_router_replay,
    check_speculation,
    engine_argument_names,
    with_head_dtype,
)


def refused(**extra: object) -> str:
    with pytest.raises(ConfigError) as error:
        check_extra(EngineSection(extra=extra))
    return str(error.value)


def test_engine_arguments_pass():
    check_extra(EngineSection(extra={"max_num_seqs": 3, "enforce_eager": True}))


def test_what_is_no_engine_argument_is_refused_with_its_key():
    assert "rollout.engine.extra.presence_penalty (2): " in refused(presence_penalty=2)
    assert refused(max_num_seq=3).endswith("Did you mean max_num_seqs?")


def test_what_another_key_says_is_refused_with_that_key():
    for name, keys in (SET_BY | SAID_BY_REQUESTS).items():
        told = refused(**{name: 1})
        assert f"rollout.engine.extra.{name} (1): " in told
        assert keys in told


def test_the_keys_that_requests_follow_are_there():
    keys = known_keys(PPOConfig)
    assert set(SAID_BY_REQUESTS.values()) <= set(keys)


def test_what_raypo_rests_on_cannot_be_changed():
    for name in FIXED:
        assert f"rollout.engine.extra.{name} (1): " in refused(**{name: 1})


def test_the_tables_name_engine_arguments_only():
    names = engine_argument_names()
    assert names is not None
    assert {*SET_BY, *FIXED} <= names


def test_a_head_in_float32_joins_the_overrides_of_the_user():
    section = EngineSection(extra={"hf_overrides": {"rope_theta": 2.0}})
    assert with_head_dtype(section, "model") is section
    overrides = with_head_dtype(section, "float32").extra["hf_overrides"]
    assert overrides == {"rope_theta": 2.0, "head_dtype": "float32"}
    with pytest.raises(ConfigError, match=r"hf_overrides \('\{\}'\): has to be a mapping"):
        with_head_dtype(EngineSection(extra={"hf_overrides": "{}"}), "float32")


def test_without_vllm_a_name_is_checked_where_the_engine_starts(monkeypatch):
    monkeypatch.setattr(vllm_arguments, "engine_argument_names", lambda: None)
    check_extra(EngineSection(extra={"presence_penalty": 2}))
    assert "is set through seed" in refused(seed=3)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class EngineArgs:\n    model: str\n    x: int = field(default=1)\n", {"model", "x"}),
        ("class EngineArgs(Other):\n    model: str\n", None),  # fields may stand elsewhere
        ("class Others:\n    model: str\n", None),
    ],
)
def test_fields_are_read_from_the_source_of_whichever_vllm_is_found(
    tmp_path, monkeypatch, source, names
):
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('too slow')\n")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert engine_argument_names.__wrapped__() == names


def test_an_unknown_argument_is_refused_without_importing_vllm():
    code = (
        "import sys\n"
        "from raypo.config import ConfigError, EngineSection\n"
        "from raypo.serving.vllm_arguments import check_extra\n"
        "try:\n    check_extra(EngineSection(extra={'penalty': 2}))\n"
        "except ConfigError as error:\n    print(error)\n"
        "print([name for name in ('vllm', 'torch', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told, heavy = done.stdout.splitlines()
    assert "extra.penalty (2)" in told
    assert heavy == "[]"


def test_a_replay_of_experts_is_refused_where_vllm_does_not_report_them(tmp_path, monkeypatch):
    routers = tmp_path / "model_executor" / "layers" / "fused_moe" / "router"
    routers.mkdir(parents=True)
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda name: installed)
    check_router_replay("off")
    with pytest.raises(ConfigError, match=r"rollout.router_replay \(engine\): the installed vLLM"):
        check_router_replay("engine")
    (routers / "cpu_router.py").touch()
    check_router_replay("engine")


def test_drafts_are_refused_where_vllm_would_keep_those_behind_a_stop_string(tmp_path, monkeypatch):
    source = tmp_path / "v1" / "engine" / "output_processor.py"
    source.parent.mkdir(parents=True)
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda name: installed)
    source.write_text("class OutputProcessor: ...")
    check_speculation("none")
    with pytest.raises(ConfigError, match=r"speculation.kind \(ngram\): the installed vLLM"):
        check_speculation("ngram")
    source.write_text("self._trim_surplus_tokens(output)")
    check_speculation("ngram")


def test_a_head_in_float32_is_refused_where_vllm_would_ignore_it(tmp_path, monkeypatch):
    source = tmp_path / "model_executor" / "layers" / "logits_processor.py"
    source.parent.mkdir(parents=True)
    installed = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda name: installed)
    source.write_text("self.head_dtype = config.head_dtype")
    check_head_dtype("float32")
    source.write_text("class LogitsProcessor: ...")
    check_head_dtype("model")
    with pytest.raises(ConfigError, match=r"model.head_dtype \(float32\): the installed vLLM"):
        check_head_dtype("float32")
