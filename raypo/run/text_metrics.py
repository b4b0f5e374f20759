"""Metrics of prompts, labels and responses as texts, by which the rules of `raypo.health` judge."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypo.data.images import without_images
from raypo.data.prompts import LoadedPrompts
from raypo.metrics.reduce import WeightedMeans
from raypo.rollout.collect import samples_of
from raypo.types import Prompt, Rollout

MAX_LABEL, MAX_ENDING = 100, 1000
"""Limits in characters: longer labels are not looked for, and only in the end of a response."""


@dataclass(frozen=True)
class TextMetrics:
    """Computes metrics of a step's texts. Step 1 also has those of the data."""

    prompts: Sequence[Prompt]
    """The training prompts, in the order of their rows. Their images are not needed."""
    of_data: dict[str, float]
    header: np.ndarray | None = None
    """Token ids of the chat template's header of an answer, or None if it has none."""

    @classmethod
    def of(
        cls,
        loaded: LoadedPrompts,
        held_out: LoadedPrompts | None,
        tokenizer: Any,
        *,
        is_episodic: bool = False,
    ) -> TextMetrics:
        """Compare all training prompts with each other, and with the held-out ones.

        Prompts of episodes are not compared: environments and agents read other columns of a row as
        well, so that rows with the same prompt can be different tasks.
        """
        distinct, of_data = np.unique(loaded.digests), dict[str, float]()
        if not is_episodic:
            of_data["data/duplicate_fraction"] = 1.0 - len(distinct) / len(loaded.digests)
            if held_out:
                of_data["data/held_out_overlap"] = float(np.isin(held_out.digests, distinct).mean())
        return cls(without_images(loaded.prompts), of_data, turn_header(tokenizer))

    def metrics(self, scored: Sequence[Rollout], *, step: int) -> dict[str, float]:
        """Return the metrics of a step's samples.

        `own_label_fraction` is the share of the responses whose end contains their label, and
        `previous_label_fraction` and `next_label_fraction` that of the label of the row before and
        after their prompt's. Rows whose neighbours have the same label are left out, and rows whose
        prompt contains one of the three, which a response may repeat.
        """
        means = WeightedMeans()
        samples, labels = samples_of(list(scored)), dict[int, list[str] | None]()
        for rollout in samples:
            if self.header is not None:
                # The text between two turns, which the policy did not write, contains the header.
                own = np.where(rollout.response_mask, rollout.response_ids, -1)
                has_header = _contains(own, self.header)
                means.add("rollout/turn_header_fraction", has_header, 1)
            index = rollout.prompt_index
            if index not in labels:
                labels[index] = self._labels_around(index)
            if around := labels[index]:
                ending = rollout.response[-MAX_ENDING:]
                for which, label in zip(("previous", "own", "next"), around, strict=True):
                    has_label = _has_word(ending, label)
                    means.add(f"rollout/{which}_label_fraction", has_label, 1)
        draws = {rollout.group_index for rollout in samples if labels[rollout.prompt_index]}
        if draws:
            means.total("rollout/labels_compared", len(draws))
        return means.values() | (self.of_data if step == 1 else {})

    def _labels_around(self, index: int) -> list[str] | None:
        """Return the labels of the row before, the row itself and the row after.

        The result is None if one of them is missing, no short text or in the row's prompt, or if
        they are not distinct.
        """
        middle = bisect_left(self.prompts, index, key=lambda prompt: prompt.index)
        near = self.prompts[max(middle - 1, 0) : middle + 2]
        labels = [prompt.label for prompt in near]
        if [prompt.index for prompt in near] != [index - 1, index, index + 1]:
            return None
        texts = [str(label).strip() for label in labels if isinstance(label, str | int | float)]
        is_short = len(texts) == 3 and all(0 < len(text) <= MAX_LABEL for text in texts)
        if not is_short or texts[1] in (texts[0], texts[2]):
            return None
        return None if any(_has_word(near[1].text, text) for text in texts) else texts


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def turn_header(tokenizer: Any) -> np.ndarray | None:
    """Return the token ids of the first line that a chat template writes before an answer."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "x"}]
    try:
        whole, without = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=adds)
            for adds in (True, False)
        )
    except Exception:  # a template may refuse such a conversation, with any error
        return None
    line = whole.removeprefix(without).strip().partition("\n")[0].strip()
    if not whole.startswith(without) or not line:
        return None
    return np.asarray(tokenizer(line, add_special_tokens=False)["input_ids"], np.int32)


def _contains(ids: np.ndarray, part: np.ndarray) -> bool:
    if len(ids) < len(part):
        return False
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(part))
    return bool((windows == part).all(axis=1).any())
