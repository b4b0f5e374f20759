"""The engine against the very model whose weights it is given; vLLM itself, no stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypo.config import EngineSection
from raypo.models.token_log_probs import response_log_probs
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.weights.buckets import Bucket
from raypo.weights.manifest import WeightError
from raypo.weights.messages import WeightPush
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

AGREES = 1e-3
"""Nats; engine and learner in float32."""
MAX_MODEL_LEN = 400
EOS = 2
SECTION = EngineSection(kv_cache_gb=0.1)
PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (5, 1, 33, 60)]


@dataclass
class Pair:
    """An engine and the learner's model that it should equal."""

    folder: str
    engine: Engine
    learner: Any
    version: int = 0
    bucket_bytes: int = 20_000

    def push(self, named_tensors: dict[str, Tensor] | None = None) -> WeightPush:
        """The learner's weights under the next version, not yet loaded."""
        self.version += 1
        tensors = weights(self.learner) if named_tensors is None else named_tensors
        return local_push(
            pack(tensors.items(), bucket_bytes=self.bucket_bytes), version=self.version
        )

    def restart(self) -> None:
        """Another engine in the place of this one."""
        self.engine.shutdown()
        self.engine = start(self.folder)

    def disturb(self) -> None:
        disturb(self.learner)

    def gap(self, completions: list[Completion], prompts=PROMPTS, temperature=1.0) -> float:
        return gap(self.learner, completions, prompts, temperature)


def weights(learner: Any) -> dict[str, Tensor]:
    """Every weight under its checkpoint name, a tied head under its own name too."""
    return dict(learner.named_parameters(remove_duplicate=False))


def probes(prompts: list[np.ndarray], max_new_tokens: int) -> list[SamplingRequest]:
    return [SamplingRequest(ids, max_new_tokens, 1.0, seed=i) for i, ids in enumerate(prompts)]


def disturb(learner: Any) -> None:
    """A change of weights that no test can overlook: 5 % noise on every tensor."""
    with torch.no_grad():
        for parameter in learner.parameters():
            spread = parameter.std() if parameter.std() > 0 else parameter.abs().mean()
            parameter.add_(torch.randn_like(parameter) * spread * 0.05)


def gap(learner: Any, completions: list[Completion], prompts=PROMPTS, temperature=1.0) -> float:
    """Largest distance between the engine's and the learner's log-probs."""
    return float(gaps(learner, completions, prompts, temperature).max())


def gaps(
    learner: Any, completions: list[Completion], prompts=PROMPTS, temperature=1.0
) -> np.ndarray:
    """Distances between the engine's and the learner's log-probs, of all tokens."""
    log_probs = [
        learner_log_probs(learner, prompt, completion.token_ids, temperature)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    engine = np.concatenate([completion.log_probs for completion in completions])
    return np.abs(engine - np.concatenate(log_probs))


def learner_log_probs(
    model: Any, prompt: np.ndarray, response: np.ndarray, temperature: float
) -> np.ndarray:
    ids = [torch.from_numpy(part.astype(np.int64))[None] for part in (prompt, response)]
    ids = [each.to(model.device) for each in ids]
    with torch.no_grad():
        log_probs, _ = response_log_probs(
            model,
            ids[0],
            torch.ones_like(ids[0], dtype=torch.bool),
            ids[1],
            torch.ones_like(ids[1], dtype=torch.bool),
            temperature=temperature,
        )
    return log_probs[0].cpu().numpy()


def start(folder: str) -> Engine:
    shape: dict[str, Any] = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    return Engine(folder, section=SECTION, reads_text=True, **shape)


def make_pair(folder: str) -> Pair:
    return Pair(folder, start(folder), AutoModelForCausalLM.from_pretrained(folder).eval())


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Iterator[Pair]:
    """Check a model with a tied head; test_engine_architectures.py has one with its own head."""
    pair = make_pair(str(tiny_policy(tmp_path_factory.mktemp("tied"))))
    yield pair
    pair.engine.shutdown()


@pytest.fixture
def served(pair: Pair) -> Pair:
    """A pair that agrees, whatever the test before it did."""
    pair.engine.load_weights(pair.push())
    return pair


def requests(number: int = 12, **changes: Any) -> list[SamplingRequest]:
    base = SamplingRequest(PROMPTS[0], max_new_tokens=24, temperature=1.0)
    return [
        replace(base, prompt_ids=PROMPTS[i % len(PROMPTS)], seed=100 + i, **changes)
        for i in range(number)
    ]


def test_engine_and_learner_agree_after_every_push(pair: Pair) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        push = pair.push()
        received = pair.engine.load_weights(push)

        completions = generate(pair.engine, probes(PROMPTS, 40))

        assert received == push.manifest
        assert repr(pair.engine).endswith(f", v{push.version}, ready)")
        assert {completion.weight_version for completion in completions} == {push.version}
        assert pair.gap(completions) < AGREES
        pair.disturb()
        assert pair.gap(completions) > 30 * AGREES, "the change would not be seen"


def test_a_tied_head_that_is_not_sent_follows_its_embedding(pair: Pair) -> None:
    torch.manual_seed(2)
    pair.disturb()
    named_once = dict(pair.learner.named_parameters())
    assert "lm_head.weight" not in named_once

    pair.engine.load_weights(pair.push(named_once))

    assert pair.gap(generate(pair.engine, probes(PROMPTS, 40))) < AGREES


def corrupted(push: WeightPush) -> WeightPush:
    bucket = push.buckets[-1]
    assert isinstance(bucket, Bucket)
    last = bucket.arrays[-1].copy()
    last[len(last) // 2] ^= 1
    changed = Bucket((*bucket.arrays[:-1], last), bucket.specs)
    return replace(push, buckets=(*push.buckets[:-1], changed))


def without(tensors: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


K_PROJ = "model.layers.0.self_attn.k_proj.weight"


def bad_pushes(pair: Pair) -> dict[str, WeightPush]:
    tensors = weights(pair.learner)
    good = pair.push()
    first = replace(good.manifest.tensors[0], checksum=good.manifest.tensors[0].checksum ^ 1)
    lying = replace(good.manifest, tensors=(first, *good.manifest.tensors[1:]))
    return {
        "do not have the checksum": corrupted(good),
        "the tensors that arrived are not those that version .* announced: .*: checksum": replace(
            good, manifest=lying
        ),
        f"{K_PROJ} is missing": pair.push(without(tensors, K_PROJ)),
        "x.weight is unknown": pair.push({**tensors, "x.weight": torch.ones(2)}),
        r"has shape \(2,\) instead of": pair.push({**tensors, K_PROJ: torch.ones(2)}),
        "raypo_load_bucket: AttributeError": replace(good, buckets=(*good.buckets, None)),
    }


@pytest.mark.parametrize("case", range(6))
def test_a_bad_push_is_refused_and_the_next_good_one_serves(pair: Pair, case: int) -> None:
    torch.manual_seed(3)
    pair.engine.load_weights(pair.push())
    pair.disturb()
    message, push = list(bad_pushes(pair).items())[case]

    with pytest.raises(WeightError, match=message):
        pair.engine.load_weights(push)

    assert repr(pair.engine).endswith(", no weights)")
    with pytest.raises(RuntimeError, match=f"push of version {push.version} failed half-way"):
        generate(pair.engine, requests(1))
    pair.engine.load_weights(pair.push())
    assert pair.gap(generate(pair.engine, probes(PROMPTS, 40))) < AGREES


def test_vllm_itself_is_asked_what_it_loaded(served: Pair, monkeypatch) -> None:
    """Should the list of expected tensors ever err, vLLM's own account still counts."""
    monkeypatch.setattr(type(served.engine._tensors), "check", lambda *_: None)
    tensors = without(weights(served.learner), "model.norm.weight")

    with pytest.raises(WeightError, match=r"vLLM did not load model\.norm\.weight"):
        served.engine.load_weights(served.push(tensors))


def test_a_seed_gives_its_response_in_any_batch(served: Pair) -> None:
    together = generate(served.engine, requests())
    reversed_ = generate(served.engine, requests()[::-1])[::-1]
    alone = [generate(served.engine, [request])[0] for request in requests()]

    assert len({tuple(completion.token_ids) for completion in together}) > 8
    for others in (reversed_, alone):
        for mine, theirs in zip(together, others, strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-4)


def test_without_seeds_samples_of_one_prompt_differ_and_do_not_repeat(served: Pair) -> None:
    same = [replace(requests(1)[0], seed=None)] * 4
    first, second = generate(served.engine, same), generate(served.engine, same)
    assert len({tuple(each.token_ids) for each in first + second}) == 8


def test_seeded_prompts_may_have_more_tokens_than_a_step_of_vllm_takes(served: Pair) -> None:
    prompts = np.random.default_rng(0).integers(3, 60, (30, 390)).astype(np.int32)  # 11,700 > 4096
    many = [
        SamplingRequest(prompt, max_new_tokens=4, temperature=1.0, seed=number)
        for number, prompt in enumerate(prompts)
    ]
    together = generate(served.engine, many)
    (alone,) = generate(served.engine, many[-1:])
    assert np.array_equal(together[-1].token_ids, alone.token_ids)


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_log_probs_are_of_the_tempered_distribution(served: Pair, temperature: float) -> None:
    completions = generate(served.engine, requests(4, temperature=temperature))
    assert served.gap(completions, temperature=temperature) < AGREES
    assert served.gap(completions, temperature=1.0) > 30 * AGREES


def test_greedy_takes_the_likeliest_and_reports_temperature_one(served: Pair) -> None:
    mixed = requests(4, temperature=0.0) + requests(4, temperature=0.7)
    for batch in (mixed[:4], mixed):
        greedy = generate(served.engine, batch)[:4]

        assert served.gap(greedy) < AGREES
        ids = torch.from_numpy(np.concatenate([PROMPTS[0], greedy[0].token_ids])).long()
        likeliest = served.learner(ids[None]).logits[0, len(PROMPTS[0]) - 1 : -1].argmax(-1)
        assert greedy[0].token_ids.tolist() == likeliest.tolist()


def test_nucleus_log_probs_are_renormalised(served: Pair) -> None:
    nucleus = generate(served.engine, requests(4, top_p=0.3))
    assert served.gap(nucleus) > AGREES
    assert all((completion.log_probs <= 0).all() for completion in nucleus)


@pytest.mark.parametrize(
    "cut", [{"top_k": 3}, {"min_p": 0.5}, {"top_p": 0.3}, {"top_k": 5, "min_p": 0.6}]
)
def test_log_probs_are_of_what_truncation_leaves_of_the_distribution(
    served: Pair, cut: dict[str, Any]
) -> None:
    for asked, answer in zip(PROMPTS, generate(served.engine, requests(4, **cut)), strict=True):
        ids = torch.from_numpy(np.concatenate([asked, answer.token_ids])).long()
        p = served.learner(ids[None]).logits[0, len(asked) - 1 : -1].double().softmax(-1)
        ranked = p.sort(descending=True).values
        lowest = cut.get("min_p", 0.0) * ranked[:, :1]
        if "top_k" in cut:
            lowest = torch.maximum(lowest, ranked[:, cut["top_k"] - 1, None])
        if "top_p" in cut:  # up to and with the token that reaches it
            needed = (ranked.cumsum(-1) < cut["top_p"]).sum(-1, keepdim=True)
            lowest = ranked.gather(1, needed)
        left = torch.where(p >= lowest, p, 0.0)
        expected = (left / left.sum(-1, keepdim=True)).log()[
            torch.arange(len(answer.token_ids)), torch.from_numpy(answer.token_ids).long()
        ]
        assert np.abs(answer.log_probs - expected.detach().numpy()).max() < AGREES


def test_a_stop_string_ends_the_response_with_the_token_that_completes_it(served: Pair) -> None:
    """The tokens before it, and all log-probs, are those of a response that went on."""
    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    for asked, free in zip(requests(4), generate(served.engine, requests(4)), strict=True):
        stop = tokenizer.decode(free.token_ids[4:6], skip_special_tokens=True)
        (ended,) = generate(served.engine, [replace(asked, stop=(stop, "never said"))])

        number = len(ended.token_ids)
        assert ended.finish_reason == "stop"
        assert ended.token_ids.tolist() == free.token_ids[:number].tolist()
        assert np.abs(ended.log_probs - free.log_probs[:number]).max() < AGREES
        texts = [
            tokenizer.decode(ended.token_ids[:last], skip_special_tokens=True)
            for last in (number - 1, number)
        ]
        assert stop in texts[1]
        assert stop not in texts[0]


def test_a_stop_token_ends_the_response_and_is_part_of_it(served: Pair) -> None:
    stops = tuple(range(40, 100))
    for completion in generate(served.engine, requests(stop_token_ids=stops)):
        *before, last = completion.token_ids.tolist()
        assert completion.token_ids.dtype == np.int32
        assert completion.log_probs.shape == completion.token_ids.shape
        assert completion.finish_reason == "stop"
        assert last in stops
        assert not set(before) & set(stops)


def test_only_the_stop_tokens_asked_for_end_a_response(served: Pair) -> None:
    """The model's end of sequence is in its generation config; it is no default here."""
    completions = generate(served.engine, requests(max_new_tokens=300)[:2])
    assert [c.finish_reason for c in completions] == ["length", "length"]
    assert [len(c.token_ids) for c in completions] == [300, 300]
    assert any(EOS in c.token_ids for c in completions)


def test_no_key_or_value_of_old_weights_is_used(served: Pair, monkeypatch) -> None:
    prompts = [np.arange(300, dtype=np.int32) % 90 + 3]  # more than two blocks of 128 tokens
    torch.manual_seed(4)
    assert served.gap(generate(served.engine, probes(prompts, 20)), prompts) < AGREES
    served.disturb()
    with monkeypatch.context() as forgetting_off:
        forgetting_off.setattr(served.engine._llm, "reset_prefix_cache", lambda **how: True)
        served.engine.load_weights(served.push())
        stale = served.gap(generate(served.engine, probes(prompts, 20)), prompts)
    assert stale > 3 * AGREES, "the prefix cache was not used: this test shows nothing"

    served.engine.load_weights(served.push())

    assert served.gap(generate(served.engine, probes(prompts, 20)), prompts) < AGREES


def test_an_engine_that_failed_while_sampling_is_broken(served: Pair, monkeypatch) -> None:
    engine = served.engine

    def fail() -> None:
        raise IndexError("index 7 is out of bounds")

    monkeypatch.setattr(engine._llm.llm_engine, "step", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"IndexError: index 7 .* Start another one"):
            generate(engine, requests(2))
    with pytest.raises(RuntimeError, match="Start another one"):
        engine.load_weights(served.push())
    assert repr(engine).endswith(", broken)")

    served.restart()
    served.engine.load_weights(served.push())
    assert served.gap(generate(served.engine, probes(PROMPTS, 40))) < AGREES


def test_there_is_one_engine_a_process(served: Pair) -> None:
    with pytest.raises(RuntimeError, match=r"has Engine\(.*, v\d+, ready\) already"):
        start(served.folder)
    assert len(generate(served.engine, requests(2))) == 2
