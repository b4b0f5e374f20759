"""vLLM engine that samples responses under weights pushed by the learner.

Concurrency. Public methods may be called from any thread; in a deployment these are the threads of
a replica (`raypo.deployment.replica`), `replica` for requests and `replica-control` for pushes.

- `raypo-vllm` (`VllmLoop`) steps vLLM. Methods decorated with `_between_steps` run in it: the
  caller waits until the current step, and any exclusive batch, has ended.
- `submit` validates requests in the caller's thread and queues them. It waits only while the queue
  is full.
- `check_health` and `stalled_s` read state without waiting.
- `raypo-gauges` exports the load to Ray's metrics.
- With tensor parallelism each GPU has a vLLM worker process. `raypo-vllm` calls them and
  waits until all have replied (`VllmProcesses`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch
from transformers import AutoConfig

from raypo.cluster.actors import ReplicaLost
from raypo.cluster.out_of_memory import ENGINE_REMEDY, memory_advice
from raypo.config import EngineSection, InFlight, LoraSection
from raypo.config.paths import short_name
from raypo.deployment.gauges import export_gauges
from raypo.models.vision import placeholder_id
from raypo.serving.adapters import Adapters, lora_arguments
from raypo.serving.inside_vllm import InsideVllm
from raypo.serving.model_tensors import ModelTensors
from raypo.serving.requests import (
    Completion,
    Load,
    LoadSummary,
    SamplingRequest,
    validate_request,
)
from raypo.serving.vllm_loop import EngineState, VllmLoop
from raypo.serving.vllm_processes import VllmProcesses
from raypo.serving.vllm_settings import engine_arguments, start_llm
from raypo.weights.adapter import AdapterPush
from raypo.weights.buckets import Bucket
from raypo.weights.manifest import Manifest, TensorSpec, WeightError, summary
from raypo.weights.messages import (
    OfferedBucket,
    PushStart,
    Ready,
    Rendezvous,
    StoredBucket,
    WeightPush,
)
from raypo.weights.store import WeightSnapshot

AnyBucket = Bucket | OfferedBucket

P = ParamSpec("P")
T = TypeVar("T")

_in_this_process: weakref.ref[Engine] | None = None


def _remember(engine: Engine | None) -> None:
    global _in_this_process
    _in_this_process = weakref.ref(engine) if engine is not None else None


def _refuse_a_second() -> None:
    if (other := _in_this_process and _in_this_process()) is not None:
        raise RuntimeError(
            f"this process has {other!r} already, but vLLM allows only one at a time. Start the "
            "second in an actor of its own, or shut the first down."
        )


def _between_steps(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[Engine, P], T]:
    """Run this method on the vLLM thread, between engine steps (after any exclusive batch)."""

    @wraps(method)
    def between_steps(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.call(partial(method, self, *args, **kwargs))

    return between_steps


class Engine:
    """vLLM engine in this process: prompts in, responses with log-probs out.

    It starts with dummy weights, or with the model's own weights if `reads_weights` is set. It
    samples only while it holds a complete weight version. Requests either form an exclusive batch
    or join the running batch at any step. Weights and memory change only between two steps.

    An exception from vLLM during sampling breaks the engine: all pending requests fail, later calls
    raise, and the owner has to start a new engine. A process can hold only one engine, because vLLM
    keeps state in globals.
    """

    def __init__(  # noqa: PLR0913 (what vLLM has to know of a run)
        self,
        model: str,
        *,
        section: EngineSection,
        dtype: str,
        max_model_len: int,
        seed: int = 0,
        num_threads: int | None = None,
        device: Literal["cpu", "cuda"] | None = None,
        lora: LoraSection | None = None,
        max_adapters: int = 1,
        reads_weights: bool = False,
        reads_text: bool = False,
        probes: int = 0,
        whole_batches: bool = False,
        max_requests: int | None = None,
        records_experts: bool = False,
        max_images: int = 1,
    ) -> None:
        """Start vLLM, which takes seconds. `load_weights` or a push then loads the weights.

        Args:
            model: Folder or hub id. Only its config is read, unless `reads_weights`.
            section: KV cache, prefix caching, queue limit, and further vLLM arguments.
            dtype: float32 or bfloat16.
            max_model_len: Maximum number of tokens of prompt and response together.
            seed: vLLM's seed, used for dummy weights. Each request has its own seed. If
                `section.seeds` is `engine`, a random seed replaces this one.
            num_threads: CPU threads for tensor operations. None keeps the current number.
            device: None means cuda if available.
            lora: Shape of the adapters that `load_adapter` accepts. None disables adapters.
            max_adapters: Maximum number of adapters held at a time; one batch may use all of them.
            reads_weights: Whether to load the model's own weights at the start, as version 0. Only
                adapters are pushed to such an engine.
            reads_text: Whether to load the tokenizer, which vLLM needs to match stop strings.
            probes: Slots beyond `max_num_seqs` that only requests with negative priority may use.
                These requests start even if all other slots are taken.
            whole_batches: Whether requests start together. Others are sampled too, but more slowly.
            max_requests: Most requests at a time. Further ones wait. None means that it is unknown.
            records_experts: Whether requests may ask for the experts of their tokens.
            max_images: Maximum number of images of a prompt, for a model that reads images.

        Raises:
            ConfigError: `section.extra` has an unknown argument, or one that another key sets.
            RuntimeError: vLLM is missing or its version is not supported, or this process already
                has an engine.
        """
        self._name = short_name(model)  # first: Ray calls `repr` even if the constructor fails
        self._serving = EngineState()
        self._was_pushed_to = False
        self._arriving: PushStart | None = None
        self._paused_by: str | None = None
        """Id of the push that paused the engine."""
        self._held: dict[str | None, str] = {}
        """Id of the push that each adapter came from, by name. The key None is the base weights."""
        self._replaced: set[str] = set()
        """Ids of pushes that newer ones have replaced."""
        self._arrived: list[TensorSpec] = []
        _refuse_a_second()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tensors = ModelTensors.of(model)
        image_token = placeholder_id(AutoConfig.from_pretrained(model))
        arguments = engine_arguments(
            model,
            section,
            dtype=dtype,
            max_model_len=max_model_len,
            # With a shared random seed, all engines of a run would sample the same responses.
            seed=int.from_bytes(os.urandom(4)) >> 1 if section.seeds == "engine" else seed,
            device=device,
            reads_text=reads_text,
            probes=probes,
            whole_batches=whole_batches,
            max_requests=max_requests,
            records_experts=records_experts,
            max_images=0 if image_token is None else max_images,
        )
        self._adapters: Adapters | None = None
        if lora is not None:
            arguments |= lora_arguments(lora, self._tensors, max_adapters=max_adapters)
            self._adapters = Adapters(self._tensors.required, most=max_adapters)
        if reads_weights:
            arguments["load_format"] = "auto"
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self._speculates = section.speculation.kind != "none"
        self._has_draft_model = section.speculation.model is not None
        threads = torch.get_num_threads() if num_threads is None else num_threads
        with memory_advice("the engine", ENGINE_REMEDY):
            self._loop = VllmLoop(
                partial(start_llm, arguments, threads),
                self._serving,
                max_waiting=section.max_waiting,
                probes=probes,
                placeholder_id=image_token,
            )
        self._stop = weakref.finalize(self, self._loop.close)
        loop, ended = self._loop, threading.Event()
        export_gauges("engine", lambda: asdict(loop.load), ended)
        self._no_more_gauges = weakref.finalize(self, ended.set)
        self._loop.adapters = self._adapters
        self._llm = self._loop.llm
        self._processes = self._loop.call(partial(VllmProcesses, self._llm))
        if records_experts:
            self._loop.call(self._record_experts)
        self._max_model_len, self._reads_text = max_model_len, reads_text
        self._vocabulary_size = InsideVllm(self._llm).vocabulary_size
        if reads_weights:
            self._serving.version = 0
        _remember(self)

    def __repr__(self) -> str:
        """Return model and state. Ray's dashboard only shows the value from the actor's start."""
        serving = self._serving
        if serving.failure is not None:
            state = "broken"
        elif serving.version is not None:
            now = "asleep" if serving.asleep else "paused" if serving.paused else "ready"
            state = f"v{serving.version}, {now}"
        else:
            state = "no weights" if self._was_pushed_to else "started"
        return f"Engine({self._name}, {state})"

    def check_health(self) -> None:
        """Raise if the engine can never sample again; its replica is then replaced.

        Does not block.

        Raises:
            RuntimeError: the engine is broken.
        """
        self._require_unbroken()

    @_between_steps
    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory of the engine's processes in GB (`VllmProcesses.peak_memory`)."""
        return self._processes.peak_memory()

    def stalled_s(self) -> float:
        """Return how long the current step or push has been running, in seconds, or 0 if idle."""
        return self._loop.progress.stalled_s()

    def num_moves(self) -> int:
        """Return the number of engine steps and of other pieces of work so far."""
        return self._loop.progress.num_moves

    def load_summary(self) -> tuple[Load, LoadSummary]:
        """Return the load, and its means and peaks since the last call of this method.

        The load is updated between steps, every 0.25 s.
        """
        summary = self._loop.load_summary()
        return self._loop.load, summary

    def submit(
        self, requests: Sequence[SamplingRequest], *, alone: bool = False
    ) -> list[Future[Completion]]:
        """Queue requests that join the running batch one by one, as soon as there is room.

        Blocks while `rollout.engine.max_waiting` requests are queued. Cancelling a future aborts
        its request. The completion of an aborted request has the tokens sampled so far, and the
        finish reason cancelled, timeout or paused. Callbacks of the futures delay sampling and must
        not submit requests.

        Args:
            requests: The requests.
            alone: Whether they form an exclusive batch. It starts when nothing else is sampled, and
                no other request joins it, so its results do not depend on other callers. Such a
                batch bypasses the queue limit.

        Returns:
            A future for each completion, in the order given.

        Raises:
            ValueError: a request is invalid. Nothing was sampled; the engine stays usable.
            RuntimeError: the engine has no complete weight version, is asleep, or is broken.
        """
        self._require_unbroken()
        refusal = self._serving.refusal()
        if refusal is not None and self._serving.paused is None:
            raise RuntimeError(refusal)
        for request in requests:
            validate_request(
                request,
                vocabulary_size=self._vocabulary_size,
                max_model_len=self._max_model_len,
                reads_text=self._reads_text,
                truncates=not self._speculates,
            )
            if request.adapter is not None:
                self._require_adapters().request(request.adapter)
        return [*self._loop.submit(requests, alone=alone)] if requests else []

    def cancel_other_attempts(self, run: str, attempt: str) -> int:
        """Cancel present and future requests of a run's other attempts, whose callers are dead.

        Args:
            run: Name of the run; the ids of its requests are `<run>/<attempt>`.
            attempt: The live attempt.

        Returns:
            Number of queued and running requests that were cancelled.
        """
        return self._loop.cancel_other_attempts(run, attempt)

    @_between_steps
    def pause(self, in_flight: InFlight = "recompute") -> None:
        """Stop sampling until `resume`. Requests that arrive meanwhile are queued.

        Args:
            in_flight: Policy for running requests when weights are pushed. `restart` drops their
                tokens and puts them back into the queue now.

        Raises:
            RuntimeError: the engine is broken.
        """
        self._require_unbroken()
        self._loop.drain_steps()
        self._serving.paused = in_flight
        if in_flight == "restart":
            self._loop.restart_running()

    @_between_steps
    def resume(self) -> None:
        """Resume sampling after a pause."""
        self._serving.paused = self._paused_by = None

    @_between_steps
    def begin_push(self, start: PushStart) -> Ready:
        """Begin a weight push. The engine samples nothing until `finish_push`.

        If the push has an `in_flight` policy, the engine also pauses until `resume`, and new
        requests are queued. Without a policy, new requests are refused, queued requests wait, and
        running requests recompute their keys and values. If an earlier push is unfinished, it is
        dropped and its pause ends.

        Returns:
            The broadcast group and the GPUs of the engine's workers.

        Raises:
            WeightError: the weights are asleep.
            RuntimeError: the engine is broken.
        """
        self._require_unbroken()
        if "weights" in self._serving.asleep:
            raise WeightError("the engine's weights are asleep: wake them up before a push.")
        self._loop.drain_steps()
        if self._paused_by is not None:
            self.resume()
        if start.in_flight is not None:
            self.pause(start.in_flight)
            self._paused_by = start.id
        self._was_pushed_to, self._arriving, self._arrived = True, start, []
        self._drop_version(f"the push of version {start.version} failed half-way")
        return Ready.merged(self._processes.ask("raypo_begin_push"))

    @_between_steps
    def load_bucket(self, bucket: AnyBucket) -> None:
        """Load some tensors of the current push.

        Raises:
            ReplicaLost: the engine was restarted during the push, so it knows of no push.
            WeightError: the bytes arrived corrupted.
            RuntimeError: the engine is broken.
        """
        self._require_a_push()
        if isinstance(bucket, StoredBucket):
            bucket = bucket.fetch()
        second_names = sorted(self._tensors.optional)
        conversions = self._tensors.conversions
        shares = self._processes.ask("raypo_load_bucket", bucket, second_names, conversions)
        if any(share != shares[0] for share in shares):
            raise WeightError("the engine's workers did not receive the same tensors.")
        self._arrived += shares[0]

    @_between_steps
    def finish_push(self, manifest: Manifest) -> Manifest:
        """End a push: check and serve the weights, and invalidate the KV cache of the old weights.

        After any failure the engine has no version and refuses to sample until a push succeeds.

        Args:
            manifest: Names, shapes and checksums of the tensors that were sent.

        Returns:
            Manifest of the tensors that arrived, with checksums computed here.

        Raises:
            ReplicaLost: the engine was restarted during the push, so it knows of no push.
            WeightError: the push does not fit this model, or differs from its manifest.
            RuntimeError: the engine is broken.
        """
        arriving = self._require_a_push()
        if manifest.version != arriving.version:
            raise WeightError(
                f"version {arriving.version} is arriving, but the call finishes version "
                f"{manifest.version}. An engine accepts only one push at a time."
            )
        self._tensors.check(manifest)
        arrived = Manifest.of(manifest.version, self._arrived)
        lines = manifest.differences(arrived)
        if lines:
            raise WeightError(
                f"the tensors that arrived are not those that version {manifest.version} "
                f"announced: {summary(lines)}."
            )
        self._processes.ask("raypo_finish_push")
        if self._adapters:
            # In a pause, adapters are pushed again before sampling resumes, so their requests go
            # back to the queue. Without a pause, their requests are aborted.
            in_pause = self._serving.paused is not None
            out = self._loop.restart_running if in_pause else self._loop.abort_running
            out(adapters=self._adapters.forget_all())
        if not self._loop.reset_kv_cache():
            raise WeightError("vLLM did not reset the prefix cache of the old weights.")
        self._serving.version, self._arriving = manifest.version, None
        self._loop.record_version(None, manifest.version)
        self._held[None] = arriving.id
        return arrived

    def load_weights(self, push: WeightPush) -> Manifest:
        """Load a whole push: `begin_push`, `load_bucket` for each bucket, `finish_push`.

        Returns:
            Manifest of the tensors that arrived, with checksums computed here.

        Raises:
            WeightError: the push does not fit this model, or differs from its manifest.
            RuntimeError: the engine is broken.
        """
        self.begin_push(PushStart(push.version, push.id))
        self._tensors.check(push.manifest)
        for bucket in push.buckets:
            self.load_bucket(bucket)
        return self.finish_push(push.manifest)

    @_between_steps
    def join_group(self, rendezvous: Rendezvous) -> None:
        """Join the process group over which weights are broadcast.

        Raises:
            WeightError: not all members joined in time.
        """
        self._processes.ask("raypo_join_group", rendezvous)

    @_between_steps
    def sleep(self, *, before_push: bool = False) -> None:
        """Free the GPU's memory: offload the weights to the host and drop the KV cache.

        Running requests are aborted (finish reason: paused). Weights without a version, as in a
        fresh engine, are dropped. vLLM's CPU build keeps its memory; there the engine only refuses
        to sample until `wake_up`.

        Args:
            before_push: Whether to drop the weights instead of offloading them, because a push
                comes before the next request.

        Raises:
            RuntimeError: the engine is broken.
        """
        self._require_unbroken()
        self._loop.abort_running()
        if not self._serving.asleep:
            if before_push:
                self._drop_version("its weights were dropped before a push")
            if self._can_sleep:
                with self._processes.vllms_own_call():
                    # No push brings the weights of a draft model back.
                    drops = self._serving.version is None and not self._has_draft_model
                    self._llm.sleep(level=2 if drops else 1)
        self._serving.asleep = {"weights", "kv_cache"}

    @_between_steps
    def wake_up(self, part: Literal["weights", "kv_cache"] | None = None) -> None:
        """Reallocate the GPU memory that `sleep` freed.

        Args:
            part: weights or kv_cache. None means both. With the weights alone the engine can
                receive a push, but cannot sample.

        Raises:
            RuntimeError: the engine is broken, or vLLM could not reset its prefix cache.
        """
        self._require_unbroken()
        parts = self._serving.asleep & ({part} if part else {"weights", "kv_cache"})
        for name in sorted(parts, reverse=True):  # weights before kv_cache
            if self._can_sleep:
                with self._processes.vllms_own_call():
                    self._llm.wake_up(tags=[name])
            self._serving.asleep -= {name}
        if "kv_cache" in parts and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache after sleep.")

    @_between_steps
    def load_adapter(self, push: AdapterPush, in_flight: InFlight | None = None) -> None:
        """Load an adapter, in place of an earlier version with the same name.

        After any failure the engine has no version of this adapter and refuses requests that name
        it.

        Args:
            push: The adapter.
            in_flight: Policy for requests that run under the adapter. None means `recompute`.

        Raises:
            WeightError: the push arrived corrupted, does not fit this model, or no slot is free.
            RuntimeError: the engine was started without adapters, has no base weights, or is
                broken.
        """
        self._require_unbroken()
        if self._serving.version is None:
            raise RuntimeError(f"the engine takes no adapter: {self._serving.no_version_reason}.")
        self._loop.drain_steps()
        if in_flight == "restart":
            self._loop.restart_running(adapters={push.name})
        try:
            self._require_adapters().load(self._processes, push)
        except Exception:
            self._loop.abort_running(adapters={push.name})
            raise
        if self._loop.has_running(push.name) and in_flight != "keep":
            self._loop.reset_kv_cache()
        self._loop.record_version(push.name, push.version)

    def hold(self, *pushes: WeightSnapshot, in_flight: InFlight | None = None) -> None:
        """Load the given pushes that this engine lacks, for example after a restart. Idempotent.

        A push is skipped if the engine already holds a newer one. A request that was in flight
        during a push is then served by the newer weights.

        Args:
            pushes: The base weights (if they are pushed), then an adapter (if any).
            in_flight: See `load_adapter`.

        Raises:
            WeightError: a push is no longer stored, arrived corrupted, or does not fit this model.
            RuntimeError: the engine was started without adapters, or is broken.
        """
        # Checked here without a lock to save fetches, and again by `_load_all` on the vLLM thread.
        missing = [snapshot for snapshot in pushes if not self._holds(snapshot)]
        fetched = [(snapshot, snapshot.fetch()) for snapshot in missing]
        if any(push is None for _, push in fetched):
            raise WeightError("this engine has lost its weights, and no copy of them is stored.")
        if fetched:
            self._load_all(fetched, in_flight)
        if self._paused_by in {snapshot.id for snapshot in pushes}:
            self.resume()  # the push that paused it has ended; its call of `resume` may be lost

    @_between_steps
    def _load_all(
        self, fetched: Sequence[tuple[WeightSnapshot, Any]], in_flight: InFlight | None
    ) -> None:
        """Load weights and adapter in one go, so that no request is sampled between the two."""
        for snapshot, push in fetched:
            if self._holds(snapshot):
                continue
            if snapshot.adapter is None:
                self.load_weights(push)
                continue
            if (before := self._held.pop(snapshot.adapter, None)) is not None:
                self._replaced.add(before)
            self.load_adapter(push, in_flight)
            self._held[snapshot.adapter] = snapshot.id

    def _holds(self, snapshot: WeightSnapshot) -> bool:
        """Return True if the engine holds this push or a newer one."""
        return self._held.get(snapshot.adapter) == snapshot.id or snapshot.id in self._replaced

    @_between_steps
    def drop_adapter(self, name: str) -> None:
        """Drop an adapter to free its slot. Does nothing if the name is unknown.

        Raises:
            RuntimeError: the engine was started without adapters, or is broken.
        """
        self._require_unbroken()
        self._held.pop(name, None)
        self._loop.abort_running(adapters={name})
        self._require_adapters().drop(self._processes, name)

    def shutdown(self) -> None:
        """Free memory and vLLM's globals, after which the process may start another engine.

        An exclusive batch is finished first; all other requests fail.
        """
        if self._stop.detach() is not None:
            self._loop.call(self._end)
            self._loop.close()

    def _record_experts(self) -> None:
        self._processes.ask("raypo_record_experts")

        def read(blocks: list[int], first: int, end: int) -> np.ndarray:
            return self._processes.ask("raypo_read_experts", blocks, first, end)[0]

        InsideVllm(self._llm).record_experts(read)

    def _drop_version(self, no_version_reason: str) -> None:
        """Drop the current version. The engine refuses to sample until a push ends."""
        self._serving.version, self._serving.no_version_reason = None, no_version_reason
        self._replaced.update(self._held.values())
        self._held.clear()

    def _end(self) -> None:
        self._no_more_gauges()
        self._serving.version, self._serving.failure = None, "it was shut down"
        InsideVllm(self._llm).shutdown()
        _remember(None)

    def _require_a_push(self) -> PushStart:
        self._require_unbroken()
        if self._arriving is None:
            raise ReplicaLost(
                "this engine was restarted during a push: no push has begun on the new process."
            )
        return self._arriving

    def _require_adapters(self) -> Adapters:
        if self._adapters is None:
            raise RuntimeError(
                "this engine has no room for adapters. Start it with lora and max_adapters."
            )
        return self._adapters

    def _require_unbroken(self) -> None:
        reason = self._serving.failure or self._processes.why_broken()
        if reason is not None:
            self._loop.mark_broken(reason)
            raise RuntimeError(self._serving.refusal())
