"""Answer the OpenAI requests of an agent: its episode's session samples and records the responses.

Everything here runs in the event loop of the episodes.
"""

from __future__ import annotations

import asyncio

import numpy as np

from raypo.config import RolloutSection
from raypo.data.chat_messages import chat_messages
from raypo.data.turns import Tools, is_ids
from raypo.endpoint.protocol import (
    Answer,
    Answered,
    ChatRequest,
    RequestError,
    Wanted,
    text_and_calls,
)
from raypo.rollout.policy import LIMIT, EpisodeLimit
from raypo.rollout.session import Session, Words


async def answer(session: Session, wanted: Wanted) -> Answer:
    """Sample all responses to a request concurrently. The model name in the request is ignored.

    Returns:
        The token ids of each prompt, and the responses: `wanted.n` for each prompt, in order.

    Raises:
        RequestError: the request contradicts a setting of the run, the chat template refuses it,
            or the episode has ended or reached a limit.
        ValueError: an argument of the request is invalid (`validate_request`).
    """
    _refuse_what_is_fixed(wanted, session.settings.section)
    is_chat = isinstance(wanted, ChatRequest)
    tools = wanted.offered_tools if is_chat else None
    prompts = [chat_messages(wanted.messages)] if is_chat else wanted.prompts
    try:
        pairs = [
            (None, np.asarray(prompt, np.int32))
            if is_ids(prompt)
            else (prompt, session.ids_of(prompt, tools))
            for prompt in prompts
        ]
    except Exception as error:  # templates can raise anything
        raise RequestError(f"the chat template refuses the prompt: {error}") from error
    tasks = [
        asyncio.create_task(_sample(session, wanted, ids, words, tools))
        for words, ids in pairs
        for _ in range(wanted.n)
    ]
    try:
        return [ids.tolist() for _, ids in pairs], await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _refuse_what_is_fixed(wanted: Wanted, section: RolloutSection) -> None:
    for key in ("temperature", "top_p"):
        value, fixed = getattr(wanted, key), getattr(section, key)
        if value not in (None, fixed):
            raise RequestError(
                f"{key} ({value}): training samples are drawn with rollout.{key} ({fixed}). "
                f"Leave {key} out, or set rollout.{key}."
            )
    if wanted.seed is not None:
        raise RequestError(
            f"seed ({wanted.seed}): each turn of an episode has its own seed, derived from the "
            "run's seed. Leave it out."
        )


async def _sample(
    session: Session, wanted: Wanted, ids: np.ndarray, words: Words | None, tools: Tools
) -> Answered:
    try:
        _, turn = await session.sample(ids, max_new_tokens=wanted.most_tokens, stop=wanted.stops)
    except EpisodeLimit as error:
        raise RequestError(str(error), code=LIMIT) from None
    sampled, tokenizer = turn.completion, session.settings.tokenizer
    if sampled.finish_reason not in ("stop", "length"):
        raise RequestError(f"the response is incomplete: {sampled.finish_reason}", 503)
    ids, ends = sampled.token_ids, session.sampling.stop_token_ids
    if words is not None:
        # The ids contain the stop string, so the remembered text must contain it too. Only a
        # conversation with the stop string may then continue this row.
        text, calls = text_and_calls(tokenizer, ids, stop_token_ids=ends, tools=tools)
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        called = [{"type": "function", "function": function} for function in functions]
        turn.remember(words, text, tools, **({"tool_calls": called} if called else {}))
    text, calls = text_and_calls(
        tokenizer, ids, stop=wanted.stops, stop_token_ids=ends, tools=tools
    )
    tokens = [tokenizer.decode([i]) for i in ids.tolist()] if wanted.wants_log_probs else []
    return Answered(text, sampled, tokens, calls)
