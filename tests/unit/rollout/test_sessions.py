"""Agents written with the `openai` package: what they ask is what is trained."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from ray.util import get_node_ip_address
from transformers import AutoTokenizer

from raypo.rollout.policy import EpisodeLimit, is_limit
from raypo.rollout.session import Session, _comparable
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from tests.stand_ins import seed_of
from tests.tiny import tiny_tokenizer
from tests.unit.rollout import test_agents
from tests.unit.rollout.test_episodes import END, SIZE, Talking

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALLED{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
told: list[Any] = []
"""What agents leave behind for a test."""


class OfTheLoop:
    """Two turns of a chat, by a client of the event loop."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            messages = [*prompt]
            for _ in range(2):
                answer = await client.chat.completions.create(model="any", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "and then?"}]
        return 2.0


class Blocking:
    """The same in a thread, as a stream, and messages that are plain dicts."""

    def run(self, prompt: Any, label: Any, policy: Session) -> float:
        assert threading.current_thread() is not threading.main_thread()
        with openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            messages: Any = [*prompt]
            for _ in range(2):
                stream = client.chat.completions.create(model="any", messages=messages, stream=True)
                text = "".join(each.choices[0].delta.content or "" for each in stream)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": "and then?"},
                ]
        return 2.0


class AsksItsOwn:
    """Messages of its own, and then others, by the endpoint or without it."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        wanted = [{"role": "system", "content": "Be brief."}, *prompt]
        if label == "endpoint":
            async with openai.AsyncOpenAI(
                base_url=policy.base_url, api_key=policy.api_key
            ) as client:
                await client.chat.completions.create(model="any", messages=wanted)
        else:
            await policy.generate(wanted)
        await policy.generate([{"role": "user", "content": "2+2"}])
        return 1.0


class CallsTools:
    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            chat = client.chat.completions
            messages = [*prompt]
            answer = await chat.create(model="any", messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            assert message.tool_calls
            assert message.content is None
            result = {"role": "tool", "content": "2", "tool_call_id": message.tool_calls[0].id}
            messages += [message.model_dump(), result]
            await chat.create(model="any", messages=messages, tools=TOOLS)
            await chat.create(model="any", messages=messages)
        return 1.0


class TellsTools:
    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        reply = await policy.generate(prompt, tools=TOOLS)
        await policy.generate([*prompt, reply.message, *prompt], tools=TOOLS)
        return 1.0


class Completes:
    """Two texts at a time, one of which is gone on with; and ids."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            ask = client.completions.create
            drafts = await ask(model="any", prompt=prompt, n=2, max_tokens=3, stop="~", logprobs=0)
            told.extend(each.logprobs.token_logprobs for each in drafts.choices if each.logprobs)
            await ask(model="any", prompt=prompt + drafts.choices[0].text + "; ", temperature=1.0)
            await ask(model="any", prompt=[5, 6, 7])
        return 1.0


class Observes:
    """As ReAct: a text that ends where the tool is to answer, and its answer; or a chat."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            if isinstance(prompt, str):
                ask = client.completions.create
                (answer,) = (await ask(model="any", prompt=prompt, stop="Observation:")).choices
                told.append(answer.text)
                await ask(model="any", prompt=f"{prompt}{answer.text}{label}")
            else:
                chat = client.chat.completions.create
                (answer,) = (await chat(model="any", messages=prompt, stop="Obs")).choices
                messages = [*prompt, answer.message, {"role": "user", "content": label}]
                await chat(model="any", messages=messages)
        return 1.0


class Wants:
    """What the label says; the answer's status and code."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with httpx.AsyncClient(base_url=policy.base_url) as client:
            key = {"Authorization": f"Bearer {policy.api_key}"}
            wanted = {"prompt": prompt, **label}
            answer = await client.post("/completions", json=wanted, headers=key)
            told.append((answer.status_code, answer.json().get("error", {}).get("message")))
            wrong = {"Authorization": f"Bearer {policy.api_key[:-1]}"}
            told.append((await client.post("/completions", json=wanted, headers=wrong)).status_code)
        return 0.0


class Says:
    """Where it can ask."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        told.append(policy.base_url)
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            await client.completions.create(model="any", prompt=prompt)
        return 1.0


class Fails:
    """Calls until the client raises, if the label says so."""

    def run(self, prompt: Any, label: Any, policy: Session) -> float:
        with openai.OpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            client.completions.create(model="any", prompt=prompt)
            while label == "talk":
                client.completions.create(model="any", prompt=prompt)
        return 1.0


class Lingers:
    """Leaves a thread behind, which asks when the episode is over."""

    over = threading.Event()
    thread: threading.Thread

    def run(self, prompt: Any, label: Any, policy: Session) -> float:
        base_url, api_key = policy.base_url, policy.api_key

        def ask() -> None:
            Lingers.over.wait(10)
            with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                try:
                    client.completions.create(model="any", prompt=prompt)
                except openai.AuthenticationError as error:
                    told.append(error.status_code)

        if label == "first":
            Lingers.thread = threading.Thread(target=ask)
            Lingers.thread.start()
        else:  # a round later, so that the server is still there
            with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
                client.completions.create(model="any", prompt=prompt)
                Lingers.over.set()
                Lingers.thread.join(10)
        return 1.0


class Calling(Talking):
    """Calls a tool where it is told of one, and says yes afterwards."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def _completion(self, request: SamplingRequest) -> Completion:
        asked = self.tokenizer.decode(request.prompt_ids)
        ids = self.tokenizer.encode("yes" if "tool: " in asked else CALL)
        ids = self.said[seed_of(request)] = np.array([*ids, END], np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), "stop", 3)


class GivesBack(Talking):
    """An engine that has no time left for what it is asked."""

    def _completion(self, request: SamplingRequest) -> Completion:
        return replace(super()._completion(request), finish_reason="timeout")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(autouse=True)
def forget():
    told.clear()


def played(tokenizer, name: str, engine: Talking | None = None, **keys: Any) -> list[Rollout]:
    agent = f"{__name__}:{name}"
    return test_agents.played(tokenizer, "", engine, **{"agent": agent, "samples": 1} | keys)


def sampled(each: Rollout) -> list[int]:
    return each.response_ids[each.response_mask].tolist()


def test_rollouts_have_the_messages_that_the_agent_has_sent(tokenizer):
    rollouts = played(tokenizer, "AsksItsOwn", labels=("endpoint", "generate"), chat=True)
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}
    assert [each.messages for each in rollouts] == [[system, user], None] * 2
    assert ["Be brief." in each.prompt for each in rollouts] == [True, False] * 2


def errors(rollouts: list[Rollout]) -> list[str | None]:
    return [each.episode.error for each in rollouts if each.episode]


@pytest.mark.parametrize("name", ["OfTheLoop", "Blocking"])
def test_a_chat_is_one_row_of_what_was_sampled(tokenizer, name):
    engine = Talking()
    rollouts = played(tokenizer, name, engine, labels=(1, 2), chat=True, samples=2)
    assert errors(rollouts) == [None] * 4
    for number, each in enumerate(rollouts):
        requests = [round_[number] for round_ in engine.rounds]
        said = np.concatenate([engine.said[seed_of(request)] for request in requests])
        assert sampled(each) == said.tolist()
        assert each.weight_versions.tolist() == [3] * len(each.response_ids)
        assert "and then?" in tokenizer.decode(each.response_ids[~each.response_mask])
    same = test_agents.played(tokenizer, "Chats", labels=(1, 2), chat=True)
    for ours, theirs in zip(rollouts, same, strict=True):  # by policy.generate
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        assert ours.log_probs.tolist() == theirs.log_probs.tolist()


def test_a_chat_with_tools_is_one_row_and_one_without_is_another(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    engine = Calling(tokenizer)
    first, second = played(tokenizer, "CallsTools", engine, chat=True, max_new_tokens=90)
    assert errors([first]) == [None]
    assert tokenizer.decode(first.prompt_ids).startswith("tools: ")
    assert tokenizer.decode(first.response_ids[~first.response_mask]) == "tool: 2assistant: "
    assert sampled(first) == [i for ids in list(engine.said.values())[:2] for i in ids]
    assert not second.prompt.startswith("tools: ")
    assert "CALLED" in second.prompt


def test_generate_tells_the_template_of_tools(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    (each,) = played(tokenizer, "TellsTools", chat=True)
    assert each.prompt.startswith("tools: ")


def test_completions_are_rows_and_their_log_probs_the_engines(tokenizer):
    engine = Talking()
    first, second, third = played(tokenizer, "Completes", engine)
    assert errors([first]) == [None]
    drafts, (more,), (ids,) = engine.rounds
    assert [(each.max_new_tokens, each.stop) for each in drafts] == [(3, ("~",))] * 2
    assert (more.max_new_tokens, more.stop) == (8, ())
    said = [engine.said[seed_of(each)].tolist() for each in (*drafts, more, ids)]
    assert sampled(first) == said[0] + said[2]
    assert sampled(second) == said[1]
    assert (third.prompt_ids.tolist(), sampled(third)) == ([5, 6, 7], said[3])
    np.testing.assert_allclose(told[0], first.log_probs[: len(said[0])])
    np.testing.assert_allclose(told[1], second.log_probs)


class Acting(Talking):
    """Acts, and writes the mark of what is to be observed, as vLLM gives it back."""

    def __init__(self, tokenizer: Any, action: str) -> None:
        super().__init__()
        self.ids = np.array(tokenizer.encode(action), np.int32)

    def _completion(self, request: SamplingRequest) -> Completion:
        ids = self.said[seed_of(request)] = self.ids
        return Completion(ids, np.zeros(len(ids), np.float32), "stop", 3)


def test_a_stop_string_that_the_agent_writes_again_is_read_once(tokenizer):
    engine = Acting(tokenizer, "add 40 2\nObservation:")
    (row,) = played(tokenizer, "Observes", engine, labels=("Observation: 42",), max_new_tokens=40)
    assert told == ["add 40 2\n"]
    read = tokenizer.decode(engine.rounds[1][0].prompt_ids)
    assert read == "1+1=add 40 2\nObservation: 42"
    assert sampled(row) == [*engine.ids, *engine.ids]  # the stop's tokens among them


def test_a_stop_string_that_the_agent_leaves_out_is_not_read(tokenizer):
    """So what goes on is a row of its own: the one that was sampled has the stop's tokens."""
    engine = Acting(tokenizer, "add 40 2\nObservation:")
    first, second = played(tokenizer, "Observes", engine, labels=("42",), max_new_tokens=40)
    assert tokenizer.decode(engine.rounds[1][0].prompt_ids) == "1+1=add 40 2\n42"
    assert sampled(first) == sampled(second) == engine.ids.tolist()

    engine = Acting(tokenizer, "add\nObs")
    rows = played(tokenizer, "Observes", engine, labels=("42",), max_new_tokens=40, chat=True)
    read = tokenizer.decode(engine.rounds[1][0].prompt_ids)
    assert read == "user: 1+1\nassistant: add\n\nuser: 42\nassistant: "
    assert [sampled(each) for each in rows] == [engine.ids.tolist()] * 2


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"temperature": 0.5}, "temperature (0.5): training samples are drawn with rollout.temp"),
        ({"top_p": 0.5}, "top_p (0.5): training samples are drawn with rollout.top_p (1.0)"),
        ({"seed": 3}, "seed (3): each turn of an episode has its own"),
        ({"top_k": 3}, "top_k: Extra inputs are not permitted"),
        ({"prompt": [SIZE]}, "prompt_ids: 300 is not in the policy's vocabulary (0 to 299)"),
    ],
)
def test_what_the_run_fixes_and_a_wrong_key_are_refused(tokenizer, wanted, message):
    engine = Talking()
    played(tokenizer, "Wants", engine, labels=(wanted,))
    (status, said), of_wrong_key = told
    assert (status, of_wrong_key) == (400, 401)
    assert said.startswith(message)
    assert not engine.rounds


def test_a_response_that_was_given_back_is_no_answer(tokenizer):
    played(tokenizer, "Wants", GivesBack(), labels=({},))
    assert told[0] == (503, "the response is incomplete: timeout")


def test_evaluation_samples_as_it_is_told_to(tokenizer):
    engine = Talking()
    played(tokenizer, "Wants", engine, labels=({"temperature": 1.0},), temperature=0.0)
    assert told[0][0] == 200
    assert [each.temperature for each in engine.rounds[0]] == [0.0]


def test_an_agent_that_fails_fails_alone(tokenizer):
    rollouts = played(tokenizer, "Fails", labels=("good", "talk"), max_turns=3)
    good, talked = (errors([each])[0] for each in rollouts if each.row_index == 0)
    assert good is None
    assert (talked or "").startswith("BadRequestError: Error code: 400")
    assert "rollout.max_turns" in (talked or "")


def test_an_episode_that_is_over_answers_no_more(tokenizer):
    rollouts = played(tokenizer, "Lingers", labels=("first", "second"))
    assert told == [401]
    assert errors(rollouts) == [None, None]
    assert [each.num_sampled > 0 for each in rollouts] == [False, True]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
def test_the_endpoint_is_where_the_config_says(tokenizer, host):
    (row,) = played(tokenizer, "Says", endpoint_host=host)
    assert errors([row]) == [None]
    reached = get_node_ip_address() if host == "0.0.0.0" else host
    assert told[0].startswith(f"http://{reached}:")


def test_the_endpoint_for_others_is_not_on_the_loopback_interface_of_a_local_ray(
    tokenizer, monkeypatch: pytest.MonkeyPatch
):
    outside = get_node_ip_address()
    monkeypatch.setattr("raypo.endpoint.agent_endpoint.get_node_ip_address", lambda: "127.0.0.1")
    played(tokenizer, "Says", endpoint_host="0.0.0.0")
    assert told[0].startswith(f"http://{outside}:")


def test_an_address_of_no_interface_is_told(tokenizer):
    (error,) = errors(played(tokenizer, "Says", endpoint_host="203.0.113.7"))
    assert (error or "").startswith(
        "ConfigError: rollout.endpoint_host (203.0.113.7): this machine cannot listen on "
        "this address: "
    )


def test_a_client_may_return_a_tool_call_with_or_without_its_index():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    forms = [call, call | {"index": 0, "id": "2"}, {"function": call["function"]}]
    first, *others = (_comparable([{"role": "assistant", "tool_calls": [c]}]) for c in forms)
    assert others == [first, first]


class GivesBackMore:
    """Returns each message with the fields that the label says, empty ones, as some clients do."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            messages = [*prompt]
            for _ in range(2):
                answer = await client.chat.completions.create(model="any", messages=messages)
                told = answer.choices[0].message.model_dump() | label
                messages += [told, {"role": "user", "content": "and then?"}]
        return 1.0


@pytest.mark.parametrize(
    "fields",
    [{"provider_specific_fields": {"refusal": None}, "annotations": []}, {"refusal": ""}],
    ids=["litellm", "refusal"],
)
def test_empty_fields_that_a_client_adds_do_not_begin_another_row(tokenizer, fields):
    (each,) = played(tokenizer, "GivesBackMore", labels=(fields,), chat=True)
    assert errors([each]) == [None]
    assert each.turn_index is not None
    assert each.turn_index.max() == 1


def test_clients_of_the_endpoint_use_no_proxy(tokenizer, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "intranet.example")
    assert errors(played(tokenizer, "OfTheLoop", chat=True)) == [None]
    assert os.environ["no_proxy"].split(",") == ["intranet.example", "127.0.0.1"]
    assert errors(played(tokenizer, "OfTheLoop", chat=True)) == [None]
    assert os.environ["NO_PROXY"].split(",") == ["intranet.example", "127.0.0.1"]


class Scripted(Talking):
    """Says these ids, turn by turn."""

    turns = ([13, 14], [16], [13, 14, 15, 16, 17], [19])

    def _completion(self, request: SamplingRequest) -> Completion:
        ids = np.array(self.turns[len(self.rounds) - 1], np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), "stop", 3)


class GoesBack:
    """Samples twice from the first prompt; the second time it gets further."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        for said in ([], [13, 14, 15], [], [13, 14, 15, 16, 17, 18]):
            await policy.generate([11, 12, *said])
        return 1.0


def test_of_rows_that_a_request_continues_the_longest_goes_on(tokenizer):
    first, second = played(tokenizer, "GoesBack", Scripted())
    assert sampled(first) == [13, 14, 16]
    assert sampled(second) == [13, 14, 15, 16, 17, 19]


def test_a_fault_of_an_agent_that_handles_a_limit_is_not_the_limit():
    def caught(raises: Any) -> BaseException:
        try:
            try:
                raise EpisodeLimit("no room")
            except EpisodeLimit as limit:
                raises(limit)
        except Exception as error:
            return error
        raise AssertionError

    def fault(limit: Exception) -> None:
        {}["answer"]

    def client(limit: Exception) -> None:
        raise ClientError("400")

    def named(limit: Exception) -> None:
        raise RuntimeError("400") from limit

    assert [is_limit(caught(each)) for each in (fault, client, named)] == [False, True, True]


class ClientError(Exception):
    pass
