"""The vLLM engine that samples responses, under weights that it is given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from raypo.config import EngineSection
from raypo.serving.checkpoint import Checkpoint
from raypo.serving.sampling import Completion, SamplingRequest, validate_request
from raypo.serving.vllm_settings import engine_arguments, start_llm
from raypo.weights.manifest import Manifest, WeightError, summary
from raypo.weights.transport import WeightPush

_in_this_process: weakref.ref[Engine] | None = None


def _remember(engine: Engine | None) -> None:
    global _in_this_process
    _in_this_process = weakref.ref(engine) if engine is not None else None


class Engine:
    """One vLLM engine inside this process: prompts in, responses with log-probs out.

    It starts with dummy weights and samples only while it holds one whole weight version. Calls
    from several threads take turns. An exception out of vLLM while it samples is the end of the
    engine: every later call says so, and its owner starts another. There is one engine a process,
    for vLLM keeps its state in globals.
    """

    def __init__(
        self,
        model: str,
        *,
        section: EngineSection,
        dtype: str,
        max_model_len: int,
        seed: int = 0,
        num_threads: int | None = None,
        device: Literal["cpu", "cuda"] | None = None,
    ) -> None:
        """Start vLLM, in seconds; the weights come with `load_weights`.

        Args:
            model: Folder or hub id; only its config is read.
            section: KV cache, prefix caching and further vLLM arguments.
            dtype: float32 or bfloat16.
            max_model_len: Most tokens of prompt and response together.
            seed: Of vLLM itself; requests bring seeds of their own.
            num_threads: Threads of this process's tensor operations; None: as they are.
            device: None: cuda where there is one.

        Raises:
            RuntimeError: vLLM is missing or its version is not supported, or this process has an
                engine already.
        """
        self._version: int | None = None  # `repr` is asked even where the start fails
        self._broken: str | None = None
        self._why_not = "no weights were pushed yet"
        if (other := _in_this_process and _in_this_process()) is not None:
            raise RuntimeError(
                f"this process has {other!r} already, and vLLM allows one at a time. "
                "Start the second in an actor of its own, or shut the first down."
            )
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._checkpoint = Checkpoint.of(model)
        arguments = engine_arguments(
            model, section, dtype=dtype, max_model_len=max_model_len, seed=seed, device=device
        )
        self._llm = start_llm(arguments)
        self._max_model_len = max_model_len
        self._vocabulary_size: int = self._llm.llm_engine.model_config.get_vocab_size()
        self._turn = threading.Lock()
        _remember(self)

    def __repr__(self) -> str:
        if self._broken is not None:
            return "Engine(broken)"
        return "Engine(no weights)" if self._version is None else f"Engine(v{self._version}, ready)"

    def weight_version(self) -> int | None:
        """The version that it samples under; None while it holds no whole one."""
        return self._version

    def check_health(self) -> None:
        """Raise if the engine can never sample again; its replica is then replaced.

        Raises:
            RuntimeError: it is broken.
        """
        self._require_unbroken()

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One response a request, in the order given.

        Raises:
            ValueError: a request cannot be served; nothing was sampled, the engine stays usable.
            RuntimeError: it holds no whole weight version, or it is broken.
        """
        with self._turn:
            self._require_unbroken()
            if self._version is None:
                raise RuntimeError(f"the engine refuses to sample: {self._why_not}.")
            for request in requests:
                validate_request(
                    request,
                    vocabulary_size=self._vocabulary_size,
                    max_model_len=self._max_model_len,
                )
            if not requests:
                return []
            return self._sample(requests, self._version)

    def load_weights(self, push: WeightPush) -> Manifest:
        """Take over a push and forget all keys and values of the old weights.

        Returns:
            What arrived, its checksums computed here. Whatever fails, the engine holds no version
            afterwards and refuses to sample until a push succeeds.

        Raises:
            WeightError: the push is not this model's, or not what its manifest says.
            RuntimeError: it is broken.
        """
        with self._turn:
            self._require_unbroken()
            self._version = None
            self._why_not = f"the push of version {push.version} failed half-way"
            self._checkpoint.check(push.manifest)
            arrived = self._receive(push)
            lines = push.manifest.differences(arrived)
            if lines:
                raise WeightError(
                    f"what arrived is not what version {push.version} announced: {summary(lines)}."
                )
            if not self._llm.reset_prefix_cache():
                raise WeightError("vLLM did not let go of the old weights' prefix cache.")
            self._version = push.version
            return arrived

    def shutdown(self) -> None:
        """Give memory and vLLM's globals back; only after this may the process start another."""
        with self._turn:
            self._version, self._broken = None, "it was shut down"
            self._llm.llm_engine.engine_core.shutdown()
            _remember(None)

    def _receive(self, push: WeightPush) -> Manifest:
        try:
            (arrived,) = self._llm.collective_rpc(
                "raypo_load_weights",
                kwargs={"push": push, "second_names": sorted(self._checkpoint.optional)},
            )
        except WeightError:
            raise
        except Exception as error:
            raise WeightError(f"version {push.version} could not be loaded: {error}") from error
        return arrived

    def _sample(self, requests: Sequence[SamplingRequest], version: int) -> list[Completion]:
        prompts = [{"prompt_token_ids": request.prompt_ids.tolist()} for request in requests]
        parameters = [_sampling_params(request) for request in requests]
        try:
            outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        except BaseException as error:
            self._broken = f"vLLM failed while it sampled ({type(error).__name__}: {error})"
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(self._broken_message()) from error
        return [_completion(output.outputs[0], version) for output in outputs]

    def _require_unbroken(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken_message())

    def _broken_message(self) -> str:
        return (
            f"this engine cannot go on: {self._broken}. "
            "Start another one and push the weights to it."
        )


def _sampling_params(request: SamplingRequest) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # stop_token_ids say all
        logprobs=0,  # the sampled token's only
        detokenize=False,
    )


def _completion(output: Any, version: int) -> Completion:
    ids = list(output.token_ids)
    log_probs = [at[token].logprob for token, at in zip(ids, output.logprobs, strict=True)]
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        log_probs=np.array(log_probs, dtype=np.float32),
        finish_reason=output.finish_reason,
        weight_version=version,
    )
