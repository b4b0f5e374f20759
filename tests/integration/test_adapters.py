"""Adapters in a real engine: each request under its own, each with versions of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from raypo.collectives import Workers
from raypo.config import EngineSection, LoraSection
from raypo.deployment.handle import local_handle
from raypo.models.lora import (
    adapter_config,
    adapter_off,
    adapter_weights,
    add_adapter,
    merged_weights,
)
from raypo.models.token_log_probs import response_log_probs
from raypo.serving.adapters import SHARED_MEMORY
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Experience
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import push_adapter
from raypo.weight_sync.transport import ObjectTransport
from raypo.weights.adapter import AdapterPush
from raypo.weights.manifest import WeightError
from tests.engine_contract import runs, until
from tests.integration.test_engine import (
    AGREES,
    MAX_MODEL_LEN,
    PROMPTS,
    gap,
    learner_log_probs,
)
from tests.stand_ins import generate, local_push, pack, versions_of
from tests.tiny import tiny_policy

SECTION = LoraSection(rank=4, alpha=16.0)
LONG = [np.arange(300, dtype=np.int32) % 90 + 3]  # more than two blocks of the prefix cache


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    is_tied = getattr(request, "param", True)
    return str(tiny_policy(tmp_path_factory.mktemp("policy"), tied=is_tied))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[Engine]:
    """Its own weights are pushed where they are tied, else it reads them itself."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    is_pushed = base.config.tie_word_embeddings
    started = Engine(
        folder,
        section=EngineSection(kv_cache_gb=0.1),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        lora=SECTION,
        max_adapters=2,
        reads_weights=not is_pushed,
    )
    if is_pushed:
        named = base.named_parameters(remove_duplicate=False)
        with torch.no_grad():
            started.load_weights(local_push(pack(named, bucket_bytes=10**6), version=7))
    assert repr(started).endswith(f", v{7 if is_pushed else 0}, ready)")
    yield started
    started.shutdown()


def learner(folder: str, seed: int, section: LoraSection = SECTION) -> Any:
    torch.manual_seed(seed)
    model = add_adapter(AutoModelForCausalLM.from_pretrained(folder), section)
    return moved(model.eval())


def moved(model: Any) -> Any:
    """A change that no test can overlook."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def push(model: Any, name: str, version: int, folder: str) -> AdapterPush:
    tensors = {weight.name: weight.merged() for weight in adapter_weights(model)}
    return AdapterPush.of(name, version, adapter_config(model, SECTION, base=folder), tensors)


def requests(adapter: str | None, prompts: list[np.ndarray] = PROMPTS) -> list[SamplingRequest]:
    return [
        SamplingRequest(prompt, 24, 1.0, seed=number, adapter=adapter)
        for number, prompt in enumerate(prompts)
    ]


def test_requests_of_one_batch_go_under_their_own_adapters(engine: Engine, folder: str) -> None:
    assert_each_goes_under_its_own_adapter(engine, folder)


def assert_each_goes_under_its_own_adapter(engine: Engine, folder: str) -> None:
    models = {"a": learner(folder, 1), "b": learner(folder, 2)}
    for version, (name, model) in enumerate(models.items()):
        engine.load_adapter(push(model, name, version, folder))
    batch = [r for trio in zip(*map(requests, (None, "a", "b")), strict=True) for r in trio]
    answers = generate(engine, batch)

    prompts = PROMPTS
    (version,) = {answer.weight_version for answer in answers[0::3]}
    assert f", v{version}, " in repr(engine)
    with adapter_off(models["a"]):
        assert gap(models["a"], answers[0::3], prompts) < AGREES
    for place, (version, (name, model)) in enumerate(enumerate(models.items()), start=1):
        own = answers[place::3]
        assert {answer.weight_version for answer in own} == {version}
        assert gap(model, own, prompts) < AGREES
        other = models["b" if name == "a" else "a"]
        assert gap(other, own, prompts) > 30 * AGREES, "the two adapters are too much alike"


def test_a_new_version_takes_the_place_of_the_old_and_none_of_its_keys(
    engine: Engine, folder: str
) -> None:
    model = learner(folder, 3)
    for version in (10, 11, 11):  # a run that goes on from a checkpoint makes a version again
        moved(model)
        engine.load_adapter(push(model, "a", version, folder))
        answers = generate(engine, requests("a", LONG))
        assert gap(model, answers, LONG) < AGREES
        assert answers[0].weight_version == version
        assert not list(SHARED_MEMORY.glob("raypo-adapter-*")), "an engine that is killed leaves it"


def test_the_engine_is_full_at_max_adapters_until_one_is_dropped(
    engine: Engine, folder: str
) -> None:
    model = learner(folder, 4)
    for name in ("a", "b"):
        engine.load_adapter(push(model, name, 20, folder))
    with pytest.raises(
        WeightError, match=r"adapter \(c\): this engine already holds its maximum of 2: a, b"
    ):
        engine.load_adapter(push(model, "c", 1, folder))
    engine.drop_adapter("a")
    engine.load_adapter(push(model, "c", 1, folder))
    assert gap(model, generate(engine, requests("c"))) < AGREES
    with pytest.raises(
        ValueError, match=r"adapter \(a\): this engine does not hold it\. It holds b, c"
    ):
        generate(engine, requests("a"))
    engine.drop_adapter("c")


def test_a_push_that_is_broken_or_of_another_model_is_refused(
    engine: Engine, folder: str, tmp_path
) -> None:
    model = learner(folder, 5)
    good = push(model, "b", 30, folder)
    torn = replace(good, data=good.data[:-1] + bytes([good.data[-1] ^ 1]))
    with pytest.raises(WeightError, match="do not have the checksum"):
        engine.load_adapter(torn)
    with pytest.raises(ValueError, match=r"adapter \(b\): this engine does not hold it"):
        generate(engine, requests("b"))
    wide = learner(str(tiny_policy(tmp_path, hidden=96)), 6)
    with pytest.raises(WeightError, match="does not fit the engine's model"):
        engine.load_adapter(push(wide, "b", 31, folder))
    engine.load_adapter(good)
    assert gap(model, generate(engine, requests("b"))) < AGREES


def test_a_new_version_reaches_what_runs_under_the_adapter_and_nothing_else(
    engine: Engine, folder: str
) -> None:
    models = {"a": learner(folder, 9), "b": learner(folder, 10)}
    for name, model in models.items():
        engine.load_adapter(push(model, name, 50, folder))
    asked = [replace(requests(name)[0], max_new_tokens=200) for name in models]
    answers = engine.submit(asked)
    until(runs(engine, 2, 20))
    before = copy.deepcopy(models["a"])
    engine.load_adapter(push(moved(models["a"]), "a", 51, folder))

    of_a, of_b = (answer.result() for answer in answers)

    assert set(versions_of(of_b)) == {50}
    assert gap(models["b"], [of_b], PROMPTS[:1]) < AGREES
    num_old = int((versions_of(of_a) == 50).sum())
    assert of_a.later_versions == ((num_old, 51),)
    assert 20 <= num_old < 200
    old, new = (
        np.abs(of_a.log_probs - learner_log_probs(model, PROMPTS[0], of_a.token_ids, 1.0))
        for model in (before, models["a"])
    )
    assert max(old[:num_old].max(), new[num_old:].max()) < AGREES < old[num_old:].max()

    restarted, other = engine.submit(asked)
    until(runs(engine, 2, 20))
    engine.load_adapter(push(moved(models["a"]), "a", 52, folder), "restart")
    assert set(versions_of(restarted.result())) == {52}, "it is sampled from its first token"
    assert other.result().token_ids.tolist() == of_b.token_ids.tolist()
    assert gap(models["a"], [restarted.result()], PROMPTS[:1]) < AGREES

    (running,) = engine.submit(asked[:1])
    until(runs(engine, 1, 5))
    engine.drop_adapter("a")
    assert running.result().finish_reason == "paused"


@dataclass
class Adapted:
    """A learner with an adapter, whose base is pushed too."""

    model: Any
    folder: str

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in merged_weights(self.model):
            yield weight.name, weight.parts[0].detach()

    def adapter_push(self, name: str, version: int) -> AdapterPush:
        return push(self.model, name, version, self.folder)

    def log_probs(self, experience: Experience) -> torch.Tensor:
        with torch.no_grad():
            return response_log_probs(
                self.model,
                experience.prompt_ids,
                experience.prompt_mask,
                experience.response_ids,
                experience.response_mask,
                temperature=1.0,
            )[0]


@pytest.mark.usefixtures("local_ray")
def test_what_waits_for_an_adapter_outlives_a_push_of_the_weights_below_it(
    engine: Engine, folder: str
) -> None:
    """What kept them was lost, so both are pushed again, while requests run and wait."""
    model = learner(folder, 11)
    asked = [replace(requests("a")[0], max_new_tokens=120, seed=seed) for seed in range(4)]
    answers: list[Future[Completion]] = []

    class AskedMeanwhile(Adapted):
        def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().base_weights()
            if answers:
                answers.extend(engine.submit(asked[2:]))

    def push_both(version: int) -> None:
        asking, client = AskedMeanwhile(model, folder), EngineClient(local_handle(engine))
        push_adapter(
            asking,
            client,
            name="a",
            version=version,
            transport=ObjectTransport(in_flight="recompute"),
            engines_have_base=False,
            workers=Workers(),
        )
        engine.resume()
        probe = Probe(
            PROMPTS[:2], 4, 1.0, "float32", seed=0, adapter="a", joins_running_batches=True
        )
        try_probe(asking, client, probe, version, Workers())

    push_both(60)
    answers += engine.submit(asked[:2])
    until(runs(engine, 2, 20))
    moved(model)
    push_both(61)
    done = [answer.result() for answer in answers]
    assert [len(each.token_ids) for each in done] == [120] * 4
    assert {version for each in done for version in versions_of(each)} == {61}
    assert gap(model, done, [PROMPTS[0]] * 4) < AGREES
    engine.drop_adapter("a")


def test_new_weights_of_the_engine_forget_the_adapters(engine: Engine, folder: str) -> None:
    model = learner(folder, 8)
    engine.load_adapter(push(model, "b", 40, folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("base_layer.weight"):
                parameter.mul_(1.2)
    named = ((weight.name, weight.parts[0].detach()) for weight in merged_weights(model))
    engine.load_weights(local_push(pack(named, bucket_bytes=10**6), version=8))
    with pytest.raises(ValueError, match=r"adapter \(b\)"):
        generate(engine, requests("b"))
    engine.load_adapter(push(model, "b", 41, folder))
    assert gap(model, generate(engine, requests("b"))) < AGREES
    with adapter_off(model):
        assert gap(model, generate(engine, requests(None))) < AGREES


@pytest.mark.parametrize("folder", [False], ids=["untied"], indirect=True)
def test_so_they_do_in_an_engine_that_read_its_weights_itself(engine: Engine, folder: str) -> None:
    """Another engine, of a model with a head of its own; the last test of this file."""
    assert_each_goes_under_its_own_adapter(engine, folder)
