"""Scheduler thread of a vLLM engine: it steps vLLM and runs everything else between two steps.

Concurrency. One thread, `raypo-vllm`, starts vLLM, steps it and is the only thread that uses it. It
also owns the state of all requests, so this state needs no lock. Any number of other threads call
`VllmLoop` (in a replica: `replica` and `replica-control`, see `raypo.deployment.replica`).

A caller appends a function to one of two lists, under the lock `_wakeup`. No thread holds this lock
while it works or waits for a result. The thread of vLLM runs the functions between steps:

- those in `_inbox` (new requests, cancellations, load queries) before every step;
- those in `_deferred_calls` (weight pushes, sleep, shutdown) only if no exclusive batch runs.

Callers wait in two places. They wait for the future of their function or request. In `submit` they
wait for a slot of the semaphore `_queue_slots`, which the thread releases when a request leaves the
queue. The thread waits only on `_wakeup`, for work or for the next deadline. It never waits for a
caller, so there is no deadlock.

Futures are resolved in the thread. Their callbacks therefore delay the next step, and must not call
`submit`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from raypo.cluster.out_of_memory import ENGINE_REMEDY, memory_advice
from raypo.concurrency import settle
from raypo.config import InFlight
from raypo.serving.adapters import Adapters
from raypo.serving.inside_vllm import InsideVllm, sampled
from raypo.serving.progress import Meter, Progress
from raypo.serving.request_state import RequestState
from raypo.serving.requests import Load, LoadSummary, SamplingRequest
from raypo.serving.vllm_requests import check_ids, completion_of, sampling_params, vllm_prompt

LOAD_UPDATE_EVERY_S = 0.25
RATE_WINDOW_S = 1.0
CLOSE_TIMEOUT_S = 5.0
"""Longest time that `close` waits for the running step, in seconds."""

T = TypeVar("T")


@dataclass
class EngineState:
    """State that decides if an engine may sample. Written between steps; read by any thread."""

    version: int | None = None
    """Weight version, or None if the engine holds no complete weights."""
    no_version_reason: str = "no weights were pushed yet"
    asleep: set[str] = field(default_factory=set)
    paused: InFlight | None = None
    failure: str | None = None

    def refusal(self) -> str | None:
        """Return why the engine cannot sample, or None if it can. A pause is not a reason."""
        if self.failure is not None:
            return (
                f"this engine cannot go on: {self.failure}. "
                "Start another one and push the weights to it."
            )
        if self.version is None:
            return f"the engine refuses to sample: {self.no_version_reason}."
        if self.asleep:
            return "the engine refuses to sample: it is asleep. Call wake_up first."
        return None

    def may_step(self) -> bool:
        """Return True if vLLM may be stepped."""
        return self.paused is None and self.refusal() is None


class VllmLoop:
    """Step loop of a vLLM in its own thread, with a request queue and a call queue.

    The module docstring describes the threads and locks.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        serving: EngineState,
        *,
        max_waiting: int,
        probes: int = 0,
        placeholder_id: int | None = None,
    ) -> None:
        """Start the thread, and vLLM in it; return when vLLM is ready.

        Args:
            start: Function that creates a `vllm.LLM`. Called in the thread.
            serving: State of the engine. vLLM is stepped only while `may_step` is True.
            max_waiting: Maximum number of requests in the queue. `submit` blocks if it is full.
            probes: Part of vLLM's `max_num_seqs` that is reserved for requests with negative
                priority.
            placeholder_id: Token that no request may sample (`sampling_params`).

        Raises:
            Exception: whatever `start` raises.
        """
        self.serving = serving
        self.adapters: Adapters | None = None
        self.load = Load()
        self.progress = Progress()
        self._placeholder_id = placeholder_id
        # Filled by other threads, emptied by the loop's thread; guarded by `_wakeup`.
        self._wakeup = threading.Condition()
        self._inbox: list[Callable[[], object]] = []
        self._deferred_calls: list[Callable[[], object]] = []
        """Functions that are deferred while an exclusive batch runs."""
        self._is_closing = False
        # Queue slots: acquired by callers in `submit`, released by the loop's thread.
        self._queue_slots = threading.Semaphore(max_waiting)
        # Used only by the loop's thread.
        self._queue: list[tuple[int, int, list[RequestState]]] = []
        """Heap of (priority, order of arrival, requests that enter vLLM together)."""
        self._num_queued = 0
        self._deadlines: list[tuple[float, int, RequestState]] = []
        """Heap of (deadline, order of arrival, request)."""
        self._live_attempts: dict[str, str] = {}
        """Live attempt of each run. Requests of its other attempts are cancelled."""
        self._arrival_counter = itertools.count()
        self._running: dict[str, RequestState] = {}
        """Requests in vLLM, by the id that its outputs have (`external_req_id`)."""
        self._is_exclusive = False
        """True while an exclusive batch is in vLLM."""
        self._salt = ""
        """Prefix of every cache salt. It changes if old weights' keys and values stay in use."""
        self._steps, self._busy_s, self._tokens, self._preemptions = 0, 0.0, 0, 0
        self._meter = Meter()
        self._load_updated_at = -math.inf
        self._rate_window_start = 0.0, 0
        """Busy seconds and token count at the start of the `tokens_per_s` window."""
        started: Future[InsideVllm] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(start, started), name="raypo-vllm", daemon=True
        )
        self._thread.start()
        self._inside = started.result()
        self.llm = self._inside.llm
        self._max_running, self._probes = self._inside.max_running - probes, probes

    def call(self, function: Callable[[], T], *, is_urgent: bool = False) -> T:
        """Run a function in the thread, between two steps. Blocks until it has run.

        If the caller is that thread itself, the function runs immediately.

        Args:
            function: The function.
            is_urgent: Whether the function may run while an exclusive batch is sampled. If not, it
                runs after the batch.

        Raises:
            RuntimeError: the engine was shut down.
            Exception: whatever the function raises.
        """
        if threading.current_thread() is self._thread:
            return function()  # waiting for itself would be a deadlock
        result: Future[T] = Future()
        target = self._inbox if is_urgent else self._deferred_calls
        self._post(target, partial(settle, result, function))
        return result.result()

    def submit(self, requests: Sequence[SamplingRequest], *, alone: bool) -> list[RequestState]:
        """Queue requests. Blocks while the queue is full.

        Requests with negative priority and exclusive batches bypass the queue limit. A request
        whose timeout passes before it gets a slot ends with finish reason `timeout`.

        Args:
            requests: Validated requests.
            alone: Sample them as an exclusive batch: they start together when nothing else runs,
                and no request joins them.

        Returns:
            For each request, the future of its completion.

        Raises:
            RuntimeError: the engine was shut down.
        """
        assert threading.current_thread() is not self._thread, "submit would wait for itself"
        now = time.monotonic()
        states = [
            RequestState(request, now + (request.timeout_s or math.inf), alone, self._request_abort)
            for request in requests
        ]
        if alone:
            self._post(self._inbox, partial(self._receive, [*states]))
            return states
        for state in states:
            has_deadline = state.deadline < math.inf
            remaining_s = max(0.0, state.deadline - time.monotonic()) if has_deadline else None
            needs_slot = state.request.priority >= 0
            if needs_slot and not self._queue_slots.acquire(timeout=remaining_s):
                state.set_result(completion_of((), (), "timeout"))
                continue
            state.has_queue_slot = needs_slot
            try:
                self._post(self._inbox, partial(self._receive, [state]))
            except RuntimeError:
                if needs_slot:
                    self._queue_slots.release()  # the next blocked caller then fails as well
                raise
        return states

    def _request_abort(self, request: RequestState) -> None:
        """Cancel a request before the next step. Does not block."""
        with suppress(RuntimeError):  # after shutdown every request has failed already
            abort = partial(self.abort, lambda state: state is request, "cancelled")
            self._post(self._inbox, abort)

    def cancel_other_attempts(self, run: str, attempt: str) -> int:
        """Cancel a run's requests of other attempts: queued, running, or still to arrive.

        Returns:
            Number of requests that were cancelled now.
        """

        def switch_attempt() -> int:
            self._live_attempts[run] = attempt
            return self.abort(self._is_from_other_attempt, "cancelled")

        return self.call(switch_attempt, is_urgent=True)

    def load_summary(self) -> LoadSummary:
        """Return means and peaks of the load since the last call of this method."""
        return self.call(self._meter.take, is_urgent=True)

    def _is_from_other_attempt(self, state: RequestState) -> bool:
        run, _, attempt = state.request.id.rpartition("/")
        return self._live_attempts.get(run, attempt) != attempt

    def mark_broken(self, reason: str) -> None:
        """Mark the engine as broken; every queued and running request then fails."""
        self.serving.failure = self.serving.failure or reason
        with self._wakeup:
            self._wakeup.notify()

    def close(self) -> None:
        """End the thread after the current step. Requests that are then unfinished fail.

        Waits at most `CLOSE_TIMEOUT_S` seconds for the thread.
        """
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _post(self, target: list[Callable[[], object]], function: Callable[[], object]) -> None:
        with self._wakeup:
            if self._is_closing:
                raise RuntimeError(self.serving.refusal() or "this engine was shut down.")
            target.append(function)
            self._wakeup.notify()

    def drain_steps(self) -> None:
        """Collect the outputs of steps in flight, which belong to the current weights.

        With asynchronous scheduling, as on GPUs, vLLM is one step ahead of its outputs.

        Raises:
            RuntimeError: vLLM failed.
        """
        if self._running:
            self._inside.drain_steps(self._step)
        if self.serving.failure is not None:
            raise RuntimeError(self.serving.refusal())

    def abort(self, selects: Callable[[RequestState], bool], reason: str) -> int:
        """Abort queued and running requests. Each future gets the tokens sampled so far.

        Args:
            selects: Predicate that selects the requests.
            reason: Finish reason of the aborted requests.

        Returns:
            Number of requests that were aborted.
        """
        queued = (state for _, _, batch in self._queue for state in batch)
        all_requests = (*queued, *self._running.values())
        selected = [state for state in all_requests if not state.done() and selects(state)]
        for state in selected:
            self._abort_one(state, reason)
        return len(selected)

    def abort_running(self, *, adapters: Collection[str | None] | None = None) -> None:
        """Abort running requests, with finish reason `paused` and the tokens sampled so far.

        Args:
            adapters: Adapters whose requests are aborted. An element None stands for requests
                under the engine's own weights. Without this argument, all running requests are
                aborted.
        """

        def selects(state: RequestState) -> bool:
            is_in_vllm = state.vllm_id is not None
            return is_in_vllm and (adapters is None or state.request.adapter in adapters)

        self.abort(selects, "paused")

    def restart_running(self, *, adapters: Collection[str | None] | None = None) -> None:
        """Drop the tokens of running requests and put the requests back into the queue.

        Args:
            adapters: Filter, as for `abort_running`.
        """
        for state in list(self._running.values()):
            if adapters is not None and state.request.adapter not in adapters:
                continue
            self._abort_in_vllm(state)
            self._enqueue([state])

    def reset_kv_cache(self) -> bool:
        """Invalidate the KV cache of replaced weights.

        Running requests recompute their keys and values. If the pause has the policy `keep`, they
        continue with the old keys and values. New requests cannot reuse these.

        Returns:
            False if vLLM could not reset its prefix cache.
        """
        if self._running and self.serving.paused == "keep":
            # The cache cannot be reset under running requests; a new salt makes its entries miss.
            self._salt = str(next(self._arrival_counter))
            return True
        self._salt = ""
        for state in self._running.values():
            self._count_preemptions(state)
        was_reset = self._inside.reset_kv_cache(include_running=bool(self._running))
        for state in self._running.values():
            # vLLM counts the reset as a preemption of each request; it is no sign of a full KV
            # cache.
            state.num_preemptions = state.scheduled.num_preemptions
        return was_reset

    def record_version(self, adapter: str | None, version: int) -> None:
        """Record that running requests under an adapter continue with new weights.

        Args:
            adapter: Adapter that was replaced. None means the engine's own weights.
            version: The new version.
        """
        for state in self._running.values():
            if state.request.adapter == adapter:
                state.versions.append((state.scheduled.num_output_tokens, version))

    def has_running(self, adapter: str) -> bool:
        """Return True if any request runs under this adapter."""
        return any(state.request.adapter == adapter for state in self._running.values())

    def _run(self, start: Callable[[], Any], started: Future[InsideVllm]) -> None:
        settle(started, lambda: InsideVllm(start()))
        if started.exception() is None:
            self._inside = started.result()
            while self._iterate():
                pass

    def _iterate(self) -> bool:
        """Run the queued functions, then one step if any request runs; return False once closed."""
        begin = time.monotonic()
        with self._wakeup:
            self._wakeup.wait_for(self._has_work, self._seconds_to_deadline())
            if not self._running and not self._num_queued:
                self._meter.note_idle(time.monotonic() - begin)
            is_closing = self._is_closing
            functions = list(self._inbox)
            self._inbox.clear()  # in place: `_post` callers hold a reference to the list
            if is_closing or not self._is_exclusive:
                functions += self._deferred_calls
                self._deferred_calls.clear()
        try:
            with self.progress.at_work():
                for function in functions:
                    function()
                    self.progress.step()
                while self._seconds_to_deadline() == 0.0:
                    self._abort_one(heapq.heappop(self._deadlines)[2], "timeout")
                self._admit()
                if self._running and self.serving.may_step():
                    self._step()
                self._update_load()
        except BaseException as error:
            self._break(error)
        if is_closing:
            self.serving.failure = self.serving.failure or "it was shut down"
        if self.serving.failure is not None:
            self._fail_all()
        return not is_closing

    def _has_work(self) -> bool:
        has_requests = bool(self._running or self._queue)
        can_process_requests = self.serving.may_step() or self.serving.failure is not None
        has_calls = bool(self._deferred_calls) and not self._is_exclusive
        can_step = has_requests and can_process_requests
        return self._is_closing or bool(self._inbox) or has_calls or can_step

    def _seconds_to_deadline(self) -> float | None:
        """Return the seconds until the next deadline, or None if no request has a deadline."""
        while self._deadlines and self._deadlines[0][2].done():
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - time.monotonic())

    def _receive(self, batch: list[RequestState]) -> None:
        refusal, is_paused = self.serving.refusal(), self.serving.paused is not None
        if refusal is not None and (self.serving.failure is not None or not is_paused):
            self._fail(batch, RuntimeError(refusal))
            return
        for state in filter(self._is_from_other_attempt, batch):  # its caller is dead
            self._abort_one(state, "cancelled")
        batch = [state for state in batch if not state.done()]
        for state in batch:
            state.arrival = next(self._arrival_counter)
            if state.deadline < math.inf:
                heapq.heappush(self._deadlines, (state.deadline, state.arrival, state))
        if batch:
            self._enqueue(batch)

    def _enqueue(self, batch: list[RequestState]) -> None:
        self._num_queued += len(batch)
        for state in batch:
            state.is_queued = True
        priority = min(state.request.priority for state in batch)
        heapq.heappush(self._queue, (priority, batch[0].arrival, batch))

    def _admit(self) -> None:
        """Move requests from the queue into vLLM, up to `max_num_seqs`.

        An exclusive batch waits until nothing runs; then it runs alone.
        """
        refusal = self.serving.refusal()
        if refusal is not None and self.serving.paused is None:
            for _, _, batch in self._queue:
                if batch[0].alone:  # a push came first; other requests stay queued
                    self._fail(batch, RuntimeError(refusal))
        popped: list[tuple[int, int, list[RequestState]]] = []
        admitted: list[RequestState] = []
        is_exclusive = self._is_exclusive
        while self._queue and not is_exclusive and self.serving.may_step():
            priority, _, batch = self._queue[0]
            if batch := [state for state in batch if not state.done()]:
                limit = self._max_running + (self._probes if priority < 0 else 0)
                is_exclusive = batch[0].alone
                if len(self._running) + len(admitted) >= (1 if is_exclusive else limit):
                    break
                admitted += self._fail_without_adapter(batch)
            popped.append(heapq.heappop(self._queue))
        try:
            if admitted:
                self._add_to_vllm(admitted)
        except BaseException:
            for item in popped:  # so that `_fail_all` fails them too
                heapq.heappush(self._queue, item)
            raise

    def _fail_without_adapter(self, batch: list[RequestState]) -> list[RequestState]:
        """Return the requests of a batch, none if an adapter was dropped while they were queued."""
        try:
            for state in batch:
                if self.adapters and state.request.adapter:
                    self.adapters.request(state.request.adapter)
        except ValueError as error:
            self._fail(batch, error)
            return []
        return batch

    def _add_to_vllm(self, batch: list[RequestState]) -> None:
        """Add requests to vLLM, all in one call."""
        self._dequeue(batch)
        requests = [state.request for state in batch]
        adapters = self.adapters
        names = self._inside.enqueue(
            [vllm_prompt(request, self._salt) for request in requests],
            [sampling_params(request, self._placeholder_id) for request in requests],
            [adapters.request(r.adapter) if adapters and r.adapter else None for r in requests],
            [request.priority for request in requests],
        )
        for state, name in zip(batch, names, strict=True):
            adapter, version = state.request.adapter, self.serving.version
            if adapters and adapter and (adapter_version := adapters.version(adapter)) is not None:
                version = adapter_version
            assert version is not None
            state.vllm_id, state.versions = name, [(0, version)]
            state.scheduled, state.num_preemptions = self._inside.scheduled(name), 0
            if state.request.images:
                check_ids(state.request, state.scheduled.prompt_token_ids)
            if state.request.with_experts:
                state.scheduled.experts = []  # filled by `InsideVllm.record_experts`
            self._running[self._output_state(state).external_req_id] = state
        self._is_exclusive = batch[0].alone

    def _step(self) -> bool:
        """Run one engine step and resolve finished requests. Return False if vLLM failed."""
        begin = time.perf_counter()
        try:
            with memory_advice("the engine", ENGINE_REMEDY):
                outputs = self._inside.step()
        except BaseException as error:
            self._break(error)
            return False
        self.progress.step()
        self._steps += 1
        self._busy_s += time.perf_counter() - begin
        for output in outputs:
            if output.finished:
                state, generated = self._running[output.request_id], output.outputs[0]
                tokens, log_probs = sampled(state.scheduled, generated.logprobs)
                self._remove_running(state, output.request_id, len(tokens))
                reason = generated.finish_reason
                experts = getattr(state.scheduled, "experts", None)
                num_prompt = len(state.request.prompt_ids)
                state.set_result(
                    completion_of(tokens, log_probs, reason, state.versions, experts, num_prompt)
                )
        return True

    def _abort_one(self, state: RequestState, reason: str) -> None:
        tokens, log_probs, experts = (), (), None
        if state.vllm_id is None:
            self._dequeue([state])
        else:
            tokens, log_probs = self._abort_in_vllm(state)
            experts = getattr(state.scheduled, "experts", None)
        num_prompt = len(state.request.prompt_ids)
        state.set_result(
            completion_of(tokens, log_probs, reason, state.versions, experts, num_prompt)
        )

    def _abort_in_vllm(self, state: RequestState) -> tuple[Sequence[int], Sequence[float]]:
        """Abort a request in vLLM; return its tokens so far and their log-probs."""
        output_state = self._output_state(state)
        assert state.vllm_id is not None, "the request is not in vLLM"
        self._inside.abort(state.vllm_id)
        tokens, log_probs = sampled(state.scheduled, output_state.logprobs_processor.logprobs)
        self._remove_running(state, output_state.external_req_id, len(tokens))
        return tokens, log_probs

    def _remove_running(self, state: RequestState, name: str, num_tokens: int) -> None:
        """Remove from `_running` a request that vLLM has finished or aborted."""
        self._count_preemptions(state)
        del self._running[name]
        state.vllm_id = None
        self._tokens += num_tokens
        self._is_exclusive = self._is_exclusive and bool(self._running)

    def _dequeue(self, states: Iterable[RequestState]) -> None:
        for state in states:
            self._num_queued -= state.is_queued
            state.is_queued = False
            if state.has_queue_slot:
                state.has_queue_slot = False
                self._queue_slots.release()

    def _fail(self, states: Iterable[RequestState], error: Exception) -> None:
        for state in states:
            if not state.done():
                self._dequeue([state])
                state.set_exception(error)

    def _break(self, error: BaseException) -> None:
        reason = f"vLLM failed while it sampled ({type(error).__name__}: {error})"
        self.serving.failure = self.serving.failure or reason
        self._fail_all(error)

    def _fail_all(self, cause: BaseException | None = None) -> None:
        for state in [
            *self._running.values(),
            *(state for _, _, batch in self._queue for state in batch),
        ]:
            error = RuntimeError(self.serving.refusal())
            error.__cause__ = cause
            self._fail([state], error)
        self._running.clear()
        self._queue.clear()
        self._is_exclusive = False

    def _output_state(self, state: RequestState) -> Any:
        """Return vLLM's state of a running request (`InsideVllm.state`)."""
        assert state.vllm_id is not None, "the request is not in vLLM"
        return self._inside.state(state.vllm_id)

    def _count_preemptions(self, state: RequestState) -> None:
        self._preemptions += state.scheduled.num_preemptions - state.num_preemptions
        state.num_preemptions = state.scheduled.num_preemptions

    def _update_load(self) -> None:
        """Update `load`.

        An update visits every running request. While requests run, it is therefore made at most
        every `LOAD_UPDATE_EVERY_S` seconds.
        """
        kv_cache = self._inside.kv_cache_use
        self._meter.note(queued=self._num_queued, running=len(self._running), kv_cache=kv_cache)
        now = time.monotonic()
        if self._running and now < self._load_updated_at + LOAD_UPDATE_EVERY_S:
            return
        self._load_updated_at = now
        tokens = self._tokens
        for state in self._running.values():
            tokens += state.scheduled.num_output_tokens
            self._count_preemptions(state)
        tokens_per_s, (begin_s, begin_tokens) = self.load.tokens_per_s, self._rate_window_start
        if self._busy_s - begin_s >= RATE_WINDOW_S:
            tokens_per_s = (tokens - begin_tokens) / (self._busy_s - begin_s)
            self._rate_window_start = self._busy_s, tokens
        drafted, accepted = self._inside.drafts
        self.load = Load(
            queued=self._num_queued,
            running=len(self._running),
            kv_cache_use=kv_cache,
            preemptions=self._preemptions,
            drafted=drafted,
            accepted=accepted,
            steps=self._steps,
            busy_s=self._busy_s,
            tokens=tokens,
            tokens_per_s=tokens_per_s,
        )
