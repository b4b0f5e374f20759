"""Prompts for a teacher model: the policy's prompt, with a solution added.

The functions here are for `distillation.teacher_prompt`. A function takes all trainable samples of
a prompt. For each sample, it returns the teacher's prompt (a text or chat messages), or None to
leave the sample out of training.

Papers: Zhao et al. 2026 (OPSD), arXiv:2601.18734; Shenfeld et al. 2026 (SDFT), arXiv:2601.19897;
Hübotter et al. 2026 (SDPO), arXiv:2601.20802.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raypo.config import ConfigError, DistillationSection, is_import_path
from raypo.custom.loader import load_function
from raypo.data.chat_messages import USUAL_FORMAT, ChatFormat, chat_messages, render
from raypo.data.prepared_rows import short
from raypo.data.stop_tokens import ids_behind, prompt_ids
from raypo.types import Rollout

TeacherPrompt = str | list[dict[str, Any]] | None
TeacherPrompts = Callable[[Sequence[Rollout]], Sequence[TeacherPrompt]]

PASSES = 1.0
"""Lowest score of a sample that is shown as a solution."""


def solution(samples: Sequence[Rollout]) -> list[TeacherPrompt]:
    """Return prompts that show the label as the solution (OPSD).

    If the label is a demonstration, this is SDFT.
    """
    return [with_solution(sample, str(sample.label)) for sample in samples]


def success(samples: Sequence[Rollout]) -> list[TeacherPrompt]:
    """Return prompts that show another sample that passes as the solution (SDPO without feedback).

    The first such sample is shown. A sample's prompt is None if no other sample passes.
    """
    passed = [sample for sample in samples if sample.score >= PASSES]
    solutions = [next((one for one in passed if one is not sample), None) for sample in samples]
    return [
        solution and with_solution(sample, solution.response)
        for sample, solution in zip(samples, solutions, strict=True)
    ]


NAMED: dict[str, TeacherPrompts] = {"solution": solution, "success": success}
"""Functions by the names that `distillation.teacher_prompt` accepts for them."""


def teacher_prompts(section: DistillationSection) -> TeacherPrompts | None:
    """Return the function of `distillation.teacher_prompt`, or None if the key is null.

    Raises:
        ConfigError: there is no such function.
    """
    name = section.teacher_prompt
    if name is None or not is_import_path(name):
        return NAMED[name] if name else None
    function = load_function(name, key="distillation.teacher_prompt")

    def checked(samples: Sequence[Rollout]) -> Sequence[TeacherPrompt]:
        prompts = list(function(list(samples)))
        if len(prompts) != len(samples):
            raise ValueError(
                f"distillation.teacher_prompt ({name}): returned {len(prompts)} prompts for "
                f"{len(samples)} samples. Return one for each, or None."
            )
        return prompts

    return checked


def with_solution(rollout: Rollout, text: str) -> TeacherPrompt:
    """Return a rollout's prompt with a solution added.

    In chat messages, the solution is added to the user's last message. In a text, it comes first.
    """
    shown = f"A correct solution is:\n\n{text}"
    if rollout.messages is None:
        return f"{shown}\n\n{rollout.prompt}"
    request = f"{shown}\n\nNow solve the problem yourself."
    messages = list(rollout.messages)
    of_user = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not of_user:
        return [*messages, {"role": "user", "content": request}]
    last = messages[of_user[-1]]
    messages[of_user[-1]] = {**last, "content": f"{last['content']}\n\n{request}"}
    return messages


def tokenised_prompt(
    tokenizer: Any, prompt: str | list[dict[str, Any]], chat: ChatFormat = USUAL_FORMAT
) -> np.ndarray:
    """Tokenise a teacher's prompt like the policy's prompts; return token ids, int32 [P].

    Raises:
        ConfigError: the prompt is neither a text nor chat messages, or the chat template refuses
            it.
    """
    if isinstance(prompt, str):
        (ids,) = prompt_ids(tokenizer, [prompt])
        return np.array(ids, np.int32)
    try:
        text = render(tokenizer, chat_messages(prompt), prompting=True, chat=chat)
    except Exception as error:  # templates can raise anything
        raise ConfigError(
            f"distillation.teacher_prompt: returned {short(prompt)}, which is not a text and "
            f"cannot be rendered as chat messages: {error}. Correct what it returns."
        ) from error
    return np.array(ids_behind(tokenizer, [text], [None])[0], np.int32)
