"""Judges, and reference and reward models in vLLM, for models too large for one device.

The results of reference and reward models equal those of `raypo.serving.frozen`, except for
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from raypo.config import ConfigError, FrozenSection
from raypo.data.chat_messages import render
from raypo.data.stop_tokens import prompt_ids
from raypo.models.checkpoint import check_weights
from raypo.models.loading import check_classifier, load_tokenizer, same_vocabulary
from raypo.models.model_files import cached_folder
from raypo.models.model_shape import ModelShape
from raypo.serving.engine_sizes import default_cpu_kv_bytes
from raypo.serving.frozen import FrozenModel, Ids, TopTokens, frozen_memory_advice, sequence_ids
from raypo.serving.inside_vllm import InsideVllm
from raypo.serving.vllm_processes import VllmProcesses
from raypo.serving.vllm_settings import (
    WORKER_EXTENSION,
    parallel_arguments,
    start_llm,
)
from raypo.types import Rollout


class VllmModel(FrozenModel):
    """Frozen model in vLLM, with weights from its own files; nothing is pushed to it."""

    def __init__(
        self,
        model: str,
        *,
        kind: Any,
        section: FrozenSection,
        dtype: str,
        max_model_len: int,
        num_threads: int | None,
        **arguments: Any,
    ) -> None:
        """Start vLLM with the model's weights.

        Args:
            model: Folder or hub id.
            kind: transformers' Auto class of the network; the files must hold all its weights.
            section: Devices and memory.
            dtype: float32 or bfloat16.
            max_model_len: Maximum number of tokens of a sequence.
            num_threads: CPU threads for tensor operations. None keeps the current number.
            arguments: Further arguments of `vllm.LLM`.

        Raises:
            ConfigError: weights are missing. vLLM would initialise a missing score head at random.
            RuntimeError: vLLM is missing or its version is not supported.
        """
        super().__init__(model, num_threads=num_threads)
        check_weights("model", model, kind)
        self._max_model_len = max_model_len
        arguments |= {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "worker_extension_cls": WORKER_EXTENSION,
        } | parallel_arguments(section.tensor_parallel)
        self._can_sleep = torch.cuda.is_available()
        if self._can_sleep:
            arguments["gpu_memory_utilization"] = section.gpu_memory_fraction
            arguments["enable_sleep_mode"] = True
        else:
            shape = ModelShape.read(model)
            a_token = shape.kv_bytes_per_token(dtype, tensor_parallel=section.tensor_parallel)
            arguments["enforce_eager"] = True
            arguments["kv_cache_memory_bytes"] = default_cpu_kv_bytes(a_token, max_model_len)
        with frozen_memory_advice(model):
            self._llm = start_llm(arguments)
        if (folder := cached_folder(model)) is not None:  # a hub id that vLLM has downloaded
            check_weights("model", folder, kind)
        self._processes = VllmProcesses(self._llm)
        self._inside = InsideVllm(self._llm)
        self._inside.before_each_step(self._progress.step)

    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory of the model's processes in GB (`VllmProcesses.peak_memory`)."""
        return self._processes.peak_memory()

    def check_health(self) -> None:
        """Raise if the model can serve no further calls. Its replica is then replaced.

        Raises:
            RuntimeError: one of its processes has ended, or the workers are unusable after a
                failure.
        """
        if (reason := self._processes.why_broken()) is not None:
            raise RuntimeError(f"{self._name} cannot go on: {reason}. Start another one.")

    def sleep(self) -> None:
        """Free the GPU's memory: offload the weights to the host."""
        if self._can_sleep:
            with self._processes.vllms_own_call():
                self._llm.sleep(level=1)

    def wake_up(self) -> None:
        """Reallocate the GPU memory that `sleep` freed."""
        if self._can_sleep:
            with self._processes.vllms_own_call():
                self._llm.wake_up()

    def shutdown(self) -> None:
        """Free memory and vLLM's globals."""
        self._inside.shutdown()

    @contextmanager
    def _working(self) -> Iterator[None]:
        vllms_own_call, at_work = self._processes.vllms_own_call, self._progress.at_work
        with frozen_memory_advice(self._name), vllms_own_call(), at_work():
            yield

    def _prompt(self, ids: np.ndarray) -> dict[str, list[int]]:
        if len(ids) > self._max_model_len:
            raise ValueError(
                f"{self!r}: a sequence has {len(ids)} tokens, and the model takes at most "
                f"{self._max_model_len}. Set placement.frozen.*.backend to torch, or lower "
                f"rollout.max_new_tokens."
            )
        return {"prompt_token_ids": ids.tolist()}


class VllmReference(VllmModel):
    """One replica of the reference model: rollouts in, log-probs of their response tokens out."""

    def __init__(
        self,
        model: str,
        *,
        section: FrozenSection,
        dtype: str,
        max_model_len: int,
        head_dtype: str = "model",
        num_threads: int | None = None,
    ) -> None:
        """Start vLLM with a causal language model; arguments as for `VllmModel`.

        `head_dtype` is `model.head_dtype`.
        """
        overrides = {"hf_overrides": {"head_dtype": head_dtype}} if head_dtype != "model" else {}
        super().__init__(
            model,
            kind=AutoModelForCausalLM,
            section=section,
            dtype=dtype,
            max_model_len=max_model_len + 1,  # vLLM samples a token after each prompt
            num_threads=num_threads,
            skip_tokenizer_init=True,
            max_logprobs=-1,  # no limit: `top_log_probs` chooses the count
            **overrides,
        )

    def log_probs(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """Return each response's log-probs at temperature 1 in nats, float32 [T], in order."""
        sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
        return [log_probs[:, 0] for log_probs, _ in self._at_responses(sequences, 0)]

    def top_log_probs(
        self, sequences: Sequence[Ids], count: int, vocabulary: int
    ) -> list[TopTokens]:
        """Return the likeliest tokens at each response position (`ReferenceModel.top_log_probs`).

        vLLM normalises over all logits, including those of padding rows of the embedding. If a
        padding token is among the likeliest, vLLM is called again for more tokens. Then all padding
        tokens that it returns are removed, and the log-probs are renormalised.
        """
        answers = self._at_responses(sequences, count)
        if any((ids[:, 1:] >= vocabulary).any() for _, ids in answers):
            padding = self._inside.vocabulary_size - vocabulary
            answers = self._at_responses(sequences, count + padding)
        # The first column is the response's own token.
        return [
            _without_padding(log_probs[:, 1:], ids[:, 1:], count, vocabulary)
            for log_probs, ids in answers
        ]

    def _at_responses(self, sequences: Sequence[Ids], count: int) -> list[TopTokens]:
        """Return log-probs and token ids of each sequence's response, [T, 1 + count] each.

        The first column is the response's own token. The other columns are the likeliest tokens,
        best first.
        """
        from vllm import SamplingParams

        width = 1 + count
        none = np.zeros((0, width), np.float32), np.zeros((0, width), np.int32)
        answers: list[TopTokens] = [none for _ in sequences]
        rows = [row for row, (_, response) in enumerate(sequences) if len(response)]
        if not rows:
            return answers
        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=count,
            flat_logprobs=True,
            detokenize=False,
        )
        prompts = [self._prompt(np.concatenate(sequences[row])) for row in rows]
        with self._working():
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        for row, output in zip(rows, outputs, strict=True):
            flat, length = output.prompt_logprobs, len(sequences[row][1])
            answers[row] = (
                np.array(flat.logprobs, np.float32).reshape(-1, width)[-length:],
                np.array(flat.token_ids, np.int32).reshape(-1, width)[-length:],
            )
        return answers


def _without_padding(
    log_probs: np.ndarray, ids: np.ndarray, count: int, vocabulary: int
) -> TopTokens:
    """Remove padding tokens (ids from `vocabulary` on) and renormalise the log-probs.

    Args:
        log_probs: Log-probs of the likeliest tokens, best first, [T, N].
        ids: Their token ids, [T, N].
        count: Number of tokens to keep per row.
        vocabulary: Size of the vocabulary without padding.

    Returns:
        Log-probs and ids of the first `count` tokens of each row, [T, count] each.
    """
    is_padding = ids >= vocabulary
    padded = np.where(is_padding, np.exp(log_probs), 0.0).sum(1, keepdims=True)
    places = np.argsort(is_padding, axis=1, kind="stable")[:, :count]
    log_probs, ids = (np.take_along_axis(each, places, axis=1) for each in (log_probs, ids))
    return log_probs - np.log1p(-padded).astype(np.float32), ids


class VllmRewardModel(VllmModel):
    """One replica of a reward model: rollouts in, one score for each out."""

    def __init__(
        self,
        model: str,
        *,
        section: FrozenSection,
        dtype: str,
        max_model_len: int,
        policy: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Start vLLM with a sequence classifier of one label.

        Args:
            model: Folder or hub id.
            section: Devices and memory.
            dtype: float32 or bfloat16.
            max_model_len: Maximum number of tokens of a rollout. It is doubled, as far as the model
                has positions, if the reward model's own tokenizer encodes the text, because the
                text may then have more tokens.
            policy: Folder or hub id of the policy, to compare vocabularies. None means always
                encode the text.
            num_threads: CPU threads for tensor operations. None keeps the current number.

        Raises:
            RuntimeError: vLLM is missing or its version is not supported.
        """
        check_classifier("model.reward", model)
        is_shared = policy is not None and same_vocabulary(model, policy, key="model.reward")
        self._tokenizer = None if is_shared else load_tokenizer(model, key="model.reward")
        super().__init__(
            model,
            kind=AutoModelForSequenceClassification,
            section=section,
            dtype=dtype,
            max_model_len=max_model_len if is_shared else longest_text(model, 2 * max_model_len),
            num_threads=num_threads,
            runner="pooling",
        )

    def score(self, rollouts: list[Rollout]) -> list[float]:
        """Return one score for each rollout, in the order given. An empty rollout gets NaN."""
        from vllm import PoolingParams

        sequences = [np.concatenate(sequence_ids(self._tokenizer, each)) for each in rollouts]
        scores = [float("nan")] * len(rollouts)
        rows = [row for row, ids in enumerate(sequences) if len(ids)]
        if not rows:
            return scores
        prompts = [self._prompt(sequences[row]) for row in rows]
        parameters = PoolingParams(use_activation=False)  # the raw score, without a sigmoid
        with self._working():
            outputs = self._llm.encode(prompts, parameters, use_tqdm=False, pooling_task="classify")
        for row, output in zip(rows, outputs, strict=True):
            (scores[row],) = output.outputs.data.float().flatten().tolist()
        return scores


class VllmJudge(VllmModel):
    """One replica of a judge: prompts in, answers out."""

    def __init__(
        self,
        model: str,
        *,
        section: FrozenSection,
        dtype: str,
        max_model_len: int,
        chat: bool,
        sampling: dict[str, Any],
        num_threads: int | None = None,
    ) -> None:
        """Start vLLM with a causal language model.

        Args:
            model: Folder or hub id.
            section: Devices and memory.
            dtype: float32 or bfloat16.
            max_model_len: Maximum number of tokens of prompt and answer, at most the model's number
                of positions.
            chat: True to put each prompt into the chat template as the user's message.
            sampling: Arguments of vLLM's SamplingParams.
            num_threads: CPU threads for tensor operations. None keeps the current number.

        Raises:
            ConfigError: `sampling` has an unknown argument or an invalid value.
            RuntimeError: vLLM is missing or its version is not supported.
        """
        self._sampling, self._chat = _sampling_params(sampling), chat
        self._tokenizer = load_tokenizer(model, key="reward.judge.path")
        super().__init__(
            model,
            kind=AutoModelForCausalLM,
            section=section,
            dtype=dtype,
            max_model_len=longest_text(model, max_model_len),
            num_threads=num_threads,
        )

    def answers(self, prompts: list[str]) -> list[str | ValueError]:
        """Return the answer to each prompt, in the order given.

        All prompts form one batch. A prompt that leaves no room for the answer gets an error.
        """
        if not prompts:
            return []
        texts = prompts
        if self._chat:
            messages = ([{"role": "user", "content": prompt}] for prompt in prompts)
            texts = [render(self._tokenizer, each, prompting=True) for each in messages]
        room = self._max_model_len - (self._sampling.max_tokens or 1)
        answers: list[str | ValueError] = [
            ValueError(
                f"reward.judge.max_model_len ({self._max_model_len}): leaves room for a prompt of "
                f"{room} tokens beside the answer, but the judge's prompt is longer, or empty. "
                f"Raise it, or lower max_tokens of reward.judge.sampling."
            )
        ] * len(prompts)
        encoded = prompt_ids(self._tokenizer, texts)
        rows = [row for row, ids in enumerate(encoded) if 0 < len(ids) <= room]
        inputs: Any = [{"prompt_token_ids": encoded[row]} for row in rows]
        with self._working():
            outputs = self._llm.generate(inputs, self._sampling, use_tqdm=False) if rows else []
        for row, output in zip(rows, outputs, strict=True):
            answers[row] = output.outputs[0].text
        return answers


def _sampling_params(values: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    structured = values.get("structured_outputs")
    try:
        if isinstance(structured, dict):
            values = values | {"structured_outputs": StructuredOutputsParams(**structured)}
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward.judge.sampling: vLLM's SamplingParams refuses it: {error}. Correct it."
        ) from error


def longest_text(model: str, most: int) -> int:
    """Return `most`, or the model's number of positions if that is smaller."""
    config: Any = AutoConfig.from_pretrained(model).get_text_config()
    return min(most, getattr(config, "max_position_embeddings", most))
