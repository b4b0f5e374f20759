"""The vLLM engine that samples responses, under weights that it is given."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import torch

from raypo.cluster.out_of_memory import ENGINE_REMEDY, memory_advice
from raypo.config import EngineSection, InFlight, LoraSection
from raypo.config.paths import short_name
from raypo.serving.adapters import Adapters, lora_arguments
from raypo.serving.asked import Asked
from raypo.serving.gauges import tell_load
from raypo.serving.model_tensors import ModelTensors
from raypo.serving.requests import (
    Completion,
    Load,
    SamplingRequest,
    Stretch,
    validate_request,
)
from raypo.serving.vllm_loop import Serving, VllmLoop
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
from raypo.weights.store import Kept

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
            f"this process has {other!r} already, and vLLM allows one at a time. "
            "Start the second in an actor of its own, or shut the first down."
        )


def _engine_seed() -> int:
    """Return a random seed: with a common one, all engines of a run would sample the same."""
    return int.from_bytes(os.urandom(4)) >> 1


def _between_steps(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[Engine, P], T]:
    """Run a method in the thread that owns vLLM; a batch that is sampled as a whole ends first."""

    @wraps(method)
    def between_steps(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.call(partial(method, self, *args, **kwargs))

    return between_steps


class Engine:
    """One vLLM engine inside this process: prompts in, responses with log-probs out.

    It starts with dummy weights (or, with `reads_weights`, its model's own) and samples only while
    it holds one whole weight version. Any thread may ask: for a batch that is sampled as a whole,
    or for responses that join what is being sampled at any step. What changes the engine happens
    between two steps. An exception out of vLLM while it samples is the end of the engine: all who
    wait are told, every later call says so, and its owner starts another. There is one engine a
    process, for vLLM keeps its state in globals.
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
        lora: LoraSection | None = None,
        max_adapters: int = 1,
        reads_weights: bool = False,
        reads_text: bool = False,
        probes: int = 0,
    ) -> None:
        """Start vLLM, in seconds; the weights come with `load_weights`.

        Args:
            model: Folder or hub id; only its config is read, unless `reads_weights`.
            section: KV cache, prefix caching, how many may wait, and further vLLM arguments.
            dtype: float32 or bfloat16.
            max_model_len: Most tokens of prompt and response together.
            seed: Of vLLM itself, which dummy weights come from; requests bring their own seeds.
                Not used where `section.seeds` is engine: see `_engine_seed`.
            num_threads: Threads of this process's tensor operations; None: as they are.
            device: None: cuda where there is one.
            lora: Of adapters that come by `load_adapter`; None: there are none.
            max_adapters: Most adapters at a time, all of them in one batch if need be.
            reads_weights: Serve the model's own weights at once, as version 0, so that only
                adapters are pushed.
            reads_text: Requests may have strings that end their response; the model's tokenizer is
                loaded for them.
            probes: Requests of priority below 0 that wait for no other one to end, where as many
                are sampled as may be.

        Raises:
            RuntimeError: vLLM is missing or its version is not supported, or this process has an
                engine already.
        """
        self._name = short_name(model)  # `repr` is asked even where the start fails
        self._serving = Serving()
        self._was_pushed_to = False
        self._arriving: PushStart | None = None
        self._paused_by: str | None = None
        """The push that it pauses for."""
        self._held: dict[str | None, str] = {}
        """Of the weights (None) and of each adapter, the push that brought them."""
        self._replaced: set[str] = set()
        """Pushes that newer ones have taken the place of."""
        self._arrived: list[TensorSpec] = []
        _refuse_a_second()
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._tensors = ModelTensors.of(model)
        arguments = engine_arguments(
            model,
            section,
            dtype=dtype,
            max_model_len=max_model_len,
            seed=_engine_seed() if section.seeds == "engine" else seed,
            device=device,
            reads_text=reads_text,
            probes=probes,
        )
        self._adapters: Adapters | None = None
        if lora is not None:
            arguments |= lora_arguments(lora, self._tensors, max_adapters=max_adapters)
            self._adapters = Adapters(self._tensors.required, most=max_adapters)
        if reads_weights:
            arguments["load_format"] = "auto"
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        threads = torch.get_num_threads() if num_threads is None else num_threads
        with memory_advice("the engine", ENGINE_REMEDY):
            self._loop = VllmLoop(
                partial(start_llm, arguments, threads),
                self._serving,
                max_waiting=section.max_waiting,
                probes=probes,
            )
        self._stop = weakref.finalize(self, self._loop.close)
        loop, ended = self._loop, threading.Event()
        tell_load(lambda: loop.load, ended)
        self._no_more_gauges = weakref.finalize(self, ended.set)
        self._loop.adapters = self._adapters
        self._llm = self._loop.llm
        self._processes = self._loop.call(partial(VllmProcesses, self._llm))
        self._max_model_len, self._reads_text = max_model_len, reads_text
        self._vocabulary_size: int = self._llm.llm_engine.model_config.get_vocab_size()
        if reads_weights:
            self._serving.version = 0
        _remember(self)

    def __repr__(self) -> str:
        """Model, version, state; Ray's dashboard keeps for good what it was asked at the start."""
        serving = self._serving
        if serving.broken is not None:
            state = "broken"
        elif serving.version is not None:
            now = "asleep" if serving.asleep else "paused" if serving.paused else "ready"
            state = f"v{serving.version}, {now}"
        else:
            state = "no weights" if self._was_pushed_to else "started"
        return f"Engine({self._name}, {state})"

    def weight_version(self) -> int | None:
        """The version that it samples under; None while it holds no whole one."""
        return self._serving.version

    def check_health(self) -> None:
        """Raise if the engine can never sample again; its replica is then replaced. Never waits.

        Raises:
            RuntimeError: it is broken.
        """
        self._require_unbroken()

    @_between_steps
    def peak_memory(self) -> dict[str, float]:
        """The most memory that its processes have held, in GB (`VllmProcesses`)."""
        return self._processes.peak_memory()

    def stalled_s(self) -> float:
        """Seconds that the step, or the push, that is under way has taken; 0 where none is."""
        return self._loop.progress.stalled_s()

    def load(self) -> Load:
        """What it is busy with, as of a quarter of a second ago at most. Never waits."""
        return self._loop.load

    def stretch(self) -> tuple[Load, Stretch]:
        """What it is busy with, and what it was since this was last asked."""
        stretch = self._loop.stretch()
        return self._loop.load, stretch

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One response a request, in the order given.

        They are a batch that enters as a whole, when nothing else is sampled, and shares its steps
        with nobody, so that it does not depend on what others ask.

        Raises:
            ValueError: a request cannot be served; nothing was sampled, the engine stays usable.
            RuntimeError: it holds no whole weight version, or it is broken.
        """
        answers = self.begin_generate(requests)
        try:
            return [each.result() for each in answers]
        except BaseException:  # of a caller that is interrupted: nobody waits for the others
            for each in answers:
                each.cancel()
            raise

    def begin_generate(self, requests: Sequence[SamplingRequest]) -> list[Future[Completion]]:
        """Start `generate` and return a future for each completion."""
        return [each.answer for each in self._ask(requests, alone=True)]

    def submit(self, requests: Sequence[SamplingRequest]) -> list[Future[Completion]]:
        """Ask for responses that join what is being sampled, one by one, as soon as there is room.

        Where `rollout.engine.max_waiting` requests wait already, it waits for places. What is given
        back before its end has a finish reason that says so: cancelled, timeout or paused. Who
        cancels a future has its request given back.
        Callbacks of the futures hold up the sampling, and must not ask for more.

        Raises:
            ValueError, RuntimeError: as `generate`.
        """
        return [each.answer for each in self._ask(requests, alone=False)]

    def answer_only(self, run: str, attempt: str) -> int:
        """Answer of a run's requests only those of one attempt; others are given back.

        Their callers are dead, and would be in the way of it.

        Args:
            run: Its name; the ids of its requests are `<run>/<attempt>`.
            attempt: The one that is alive.

        Returns:
            How many were under way.
        """
        return self._loop.answer_only(run, attempt)

    @_between_steps
    def pause(self, in_flight: InFlight = "recompute") -> None:
        """Sample nothing until `resume`; what is asked meanwhile waits.

        Args:
            in_flight: What becomes of requests that are being sampled when weights are pushed. For
                `restart` they wait for their turn again, from here on.

        Raises:
            RuntimeError: it is broken.
        """
        self._require_unbroken()
        self._loop.settle()
        self._serving.paused = in_flight
        if in_flight == "restart":
            self._loop.restart_running()

    @_between_steps
    def resume(self) -> None:
        """Go on after a pause."""
        self._serving.paused = self._paused_by = None

    @_between_steps
    def begin_push(self, start: PushStart) -> Ready:
        """Let go of the weights: from here until `finish_push` the engine samples nothing.

        Where the push says what becomes of what is in flight, it pauses too, until `resume`. Else
        what is asked meanwhile is refused, what has joined waits, and what runs is recomputed. A
        push that was begun before and has not come to its end is given up, with its pause.

        Raises:
            RuntimeError: it is broken.
        """
        self._require_unbroken()
        if "weights" in self._serving.asleep:
            raise WeightError("the engine's weights sleep: wake them before a push begins.")
        self._loop.settle()
        if self._paused_by is not None:
            self.resume()
        if start.in_flight is not None:
            self.pause(start.in_flight)
            self._paused_by = start.id
        self._was_pushed_to, self._arriving, self._arrived = True, start, []
        self._let_go(f"the push of version {start.version} failed half-way")
        return Ready.merged(self._ask_workers("raypo_begin_push"))

    @_between_steps
    def load_bucket(self, bucket: AnyBucket) -> None:
        """Take some of the tensors of the push that was begun.

        Raises:
            WeightError: no push was begun, or the bytes did not arrive as they were sent.
        """
        self._require_a_push()
        if isinstance(bucket, StoredBucket):
            bucket = bucket.fetch()
        second_names = sorted(self._tensors.optional)
        shares = self._ask_workers("raypo_load_bucket", bucket, second_names)
        if any(share != shares[0] for share in shares):
            raise WeightError("the engine's workers did not receive the same tensors.")
        self._arrived += shares[0]

    @_between_steps
    def finish_push(self, manifest: Manifest) -> Manifest:
        """Serve under the new weights, and forget all keys and values of the old ones.

        Returns:
            What arrived, its checksums computed here. Whatever fails, the engine holds no version
            afterwards and refuses to sample until a push succeeds.

        Raises:
            WeightError: the push is not this model's, or not what its manifest says.
        """
        arriving = self._require_a_push()
        if manifest.version != arriving.version:
            raise WeightError(
                f"version {arriving.version} is arriving, and version {manifest.version} was "
                "to be finished. Only one push at a time may go to an engine."
            )
        self._tensors.check(manifest)
        arrived = Manifest.of(manifest.version, self._arrived)
        lines = manifest.differences(arrived)
        if lines:
            raise WeightError(
                f"what arrived is not what version {manifest.version} announced: {summary(lines)}."
            )
        self._ask_workers("raypo_finish_push")
        if self._adapters:
            in_pause = self._serving.paused is not None  # the adapters come before its end
            out = self._loop.restart_running if in_pause else self._loop.give_back_running
            out(adapters=self._adapters.forget_all())
        if not self._loop.forget_keys():
            raise WeightError("vLLM did not let go of the old weights' prefix cache.")
        self._serving.version, self._arriving = manifest.version, None
        self._loop.note_version(None, manifest.version)
        self._held[None] = arriving.id
        return arrived

    def load_weights(self, push: WeightPush) -> Manifest:
        """A whole push at once, from where its buckets are kept; as the three calls above.

        Raises:
            WeightError: the push is not this model's, or not what its manifest says.
            RuntimeError: it is broken.
        """
        self.begin_push(PushStart(push.version, push.id))
        self._tensors.check(push.manifest)
        for bucket in push.buckets:
            self.load_bucket(bucket)
        return self.finish_push(push.manifest)

    @_between_steps
    def join_group(self, rendezvous: Rendezvous) -> None:
        """Become a member of the group that weights are broadcast in.

        Raises:
            WeightError: not all members came in time.
        """
        self._ask_workers("raypo_join_group", rendezvous)

    @_between_steps
    def sleep(self, *, before_push: bool = False) -> None:
        """Give the GPU's memory to others: weights to the host, keys and values away.

        Requests that are being sampled are given back (finish reason: paused).

        Weights of no version, as a fresh engine has, are dropped. vLLM's CPU build keeps all of
        its memory; there the engine only refuses to sample until it is woken.

        Args:
            before_push: Other weights come before anything is sampled, so these are dropped too.
        """
        self._require_unbroken()
        self._loop.give_back_running()
        if not self._serving.asleep:
            if before_push:
                self._let_go("its weights were dropped before a push")
            if self._can_sleep:
                with self._processes.vllms_own_call():
                    self._llm.sleep(level=2 if self._serving.version is None else 1)
        self._serving.asleep = {"weights", "kv_cache"}

    @_between_steps
    def wake_up(self, part: Literal["weights", "kv_cache"] | None = None) -> None:
        """Take memory again; for `weights` alone a push can be loaded, but nothing sampled.

        Args:
            part: weights or kv_cache; None: both.
        """
        self._require_unbroken()
        parts = self._serving.asleep & ({part} if part else {"weights", "kv_cache"})
        for name in sorted(parts, reverse=True):  # weights first: they are there to stay
            if self._can_sleep:
                with self._processes.vllms_own_call():
                    self._llm.wake_up(tags=[name])
            self._serving.asleep -= {name}
        if "kv_cache" in parts and not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not let go of the prefix cache that it slept through.")

    @_between_steps
    def load_adapter(self, push: AdapterPush, in_flight: InFlight | None = None) -> None:
        """Put a version of an adapter in the place of its earlier one; others stay as they are.

        Whatever fails, the engine holds no version of this adapter afterwards, and refuses requests
        that name it.

        Args:
            push: The version.
            in_flight: What becomes of requests that run under it; None: they are recomputed.

        Raises:
            WeightError: it did not arrive whole, is not of this model, or there is no room.
            RuntimeError: the engine was started without adapters, holds no weights of its own, or
                is broken.
        """
        self._require_unbroken()
        if self._serving.version is None:
            raise RuntimeError(f"the engine takes no adapter: {self._serving.why_not}.")
        self._loop.settle()
        if in_flight == "restart":
            self._loop.restart_running(adapters={push.name})
        try:
            self._require_adapters().load(self._processes, push)
        except Exception:
            self._loop.give_back_running(adapters={push.name})
            raise
        if self._loop.runs(push.name) and in_flight != "keep":
            self._loop.forget_keys()
        self._loop.note_version(push.name, push.version)

    def hold(self, *pushes: Kept, in_flight: InFlight | None = None) -> None:
        """Load what of these the engine does not hold: it is new, or was started again since.

        A request may be on its way while weights are pushed. What it asks for and has been
        replaced meanwhile is not loaded again: the request is served by what is newer.

        Args:
            pushes: The weights, where they are pushed, and then an adapter.
            in_flight: As for `load_adapter`.

        Raises:
            WeightError: one is kept no longer, did not arrive whole, or is not of this model.
            RuntimeError: the engine was started without adapters, or is broken.
        """
        missing = [kept for kept in pushes if not self._holds(kept)]
        found = [(kept, kept.fetch()) for kept in missing]
        if any(push is None for _, push in found):
            raise WeightError("this engine has lost its weights, and nothing of them is kept.")
        if found:
            self._load_all(found, in_flight)
        if self._paused_by in {kept.id for kept in pushes}:
            self.resume()  # it missed that: what requires a push is asked after its end

    @_between_steps
    def _load_all(self, found: Sequence[tuple[Kept, Any]], in_flight: InFlight | None) -> None:
        """Nothing is sampled under the weights before their adapter is there too."""
        for kept, push in found:
            if self._holds(kept):
                continue
            if kept.adapter is None:
                self.load_weights(push)
                continue
            if (before := self._held.pop(kept.adapter, None)) is not None:
                self._replaced.add(before)
            self.load_adapter(push, in_flight)
            self._held[kept.adapter] = kept.id

    def _holds(self, kept: Kept) -> bool:
        """Whether it has a push, or a newer one in its place."""
        return self._held.get(kept.adapter) == kept.id or kept.id in self._replaced

    @_between_steps
    def drop_adapter(self, name: str) -> None:
        """Make room for another adapter; nothing happens where there is none of that name."""
        self._require_unbroken()
        self._held.pop(name, None)
        self._loop.give_back_running(adapters={name})
        self._require_adapters().drop(self._processes, name)

    def shutdown(self) -> None:
        """Give memory and vLLM's globals back; only after this may the process start another.

        A batch that is sampled as a whole comes to its end; other requests are answered with an
        error.
        """
        if self._stop.detach() is not None:
            self._loop.call(self._end)
            self._loop.close()

    def _let_go(self, why_not: str) -> None:
        """Be of no version, until a push comes to its end."""
        self._serving.version, self._serving.why_not = None, why_not
        self._replaced.update(self._held.values())
        self._held.clear()

    def _end(self) -> None:
        self._no_more_gauges()
        self._serving.version, self._serving.broken = None, "it was shut down"
        self._llm.llm_engine.engine_core.shutdown()
        _remember(None)

    def _ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The answer of every vLLM worker."""
        try:
            return self._processes.ask(method, *arguments)
        except WeightError:
            raise
        except Exception as error:
            version = self._arriving and self._arriving.version
            raise WeightError(f"version {version} could not be loaded: {error}") from error

    def _require_a_push(self) -> PushStart:
        self._require_unbroken()
        if self._arriving is None:
            raise WeightError("no push was begun on this engine. Push the weights again.")
        return self._arriving

    def _require_adapters(self) -> Adapters:
        if self._adapters is None:
            raise RuntimeError(
                "this engine has no room for adapters. Start it with lora and max_adapters."
            )
        return self._adapters

    def _ask(self, requests: Sequence[SamplingRequest], *, alone: bool) -> list[Asked]:
        """Hand requests to the thread that samples."""
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
            )
            if request.adapter is not None:
                self._require_adapters().request(request.adapter)
        return self._loop.submit(requests, alone=alone) if requests else []

    def _require_unbroken(self) -> None:
        reason = self._serving.broken or self._processes.why_broken()
        if reason is not None:
            self._loop.give_up(reason)
            raise RuntimeError(self._serving.refusal())
