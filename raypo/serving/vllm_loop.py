"""Scheduler thread of a vLLM engine: it steps vLLM and runs everything else between two steps.

Concurrency. One thread, `raypo-vllm`, starts vLLM, steps it and is the only thread that uses it. It
also owns the state of all requests, so this state needs no lock. Any number of other threads call
`VllmLoop` (in a replica: `replica` and `replica-control`, see `raypo.deployment.replica`).

A caller appends a function to one of two lists, under the lock `_door`. No thread holds this lock
while it works or waits for a result. The thread of vLLM runs the functions between steps:

- those in `_news` (new requests, cancellations, load queries) before every step;
- those in `_calls` (weight pushes, sleep, shutdown) only if no exclusive batch runs.

Callers wait in two places. They wait for the future of their function or request. In `submit` they
wait for a slot of the semaphore `_places`; the thread releases it when a request leaves the queue.
The thread waits only on `_door`, for work or for the next deadline. It never waits for a caller, so
there is no deadlock.

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
from raypo.serving.requests import Load, SamplingRequest, Stretch
from raypo.serving.vllm_requests import check_ids, completion_of, sampling_params, vllm_prompt

LOOK_EVERY_S = 0.25
RATE_OVER_S = 1.0
LEAVE_S = 5.0
"""Longest time that `close` waits for the running step, in seconds."""

T = TypeVar("T")


@dataclass
class Serving:
    """State that decides if an engine may sample. Written between steps; read by any thread."""

    version: int | None = None
    """Weight version, or None if the engine holds no complete weights."""
    why_not: str = "no weights were pushed yet"
    asleep: set[str] = field(default_factory=set)
    paused: InFlight | None = None
    broken: str | None = None

    def refusal(self) -> str | None:
        """Return why the engine cannot sample, or None if it can. A pause is not a reason."""
        if self.broken is not None:
            return (
                f"this engine cannot go on: {self.broken}. "
                "Start another one and push the weights to it."
            )
        if self.version is None:
            return f"the engine refuses to sample: {self.why_not}."
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
        serving: Serving,
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
        # Filled by other threads, emptied by the loop's thread; guarded by `_door`.
        self._door = threading.Condition()
        self._news: list[Callable[[], object]] = []
        self._calls: list[Callable[[], object]] = []
        """Functions that are deferred while an exclusive batch runs."""
        self._is_closing = False
        # Queue slots: acquired by callers in `submit`, released by the loop's thread.
        self._places = threading.Semaphore(max_waiting)
        # Used only by the loop's thread.
        self._queue: list[tuple[int, int, list[RequestState]]] = []
        """Heap of (priority, order of arrival, requests that enter vLLM together)."""
        self._num_queued = 0
        self._deadlines: list[tuple[float, int, RequestState]] = []
        """Heap of (deadline, order of arrival, request)."""
        self._attempts: dict[str, str] = {}
        """Live attempt of each run. Requests of its other attempts are cancelled."""
        self._numbers = itertools.count()
        self._running: dict[str, RequestState] = {}
        """Requests in vLLM, by the id that its outputs have (`external_req_id`)."""
        self._runs_alone = False
        """True while an exclusive batch is in vLLM."""
        self._salt = ""
        """Prefix of every cache salt. It changes if old weights' keys and values stay in use."""
        self._steps, self._busy_s, self._tokens, self._preemptions = 0, 0.0, 0, 0
        self._meter = Meter()
        self._looked_at = -math.inf
        self._rate_from = 0.0, 0
        """Busy seconds and token count at the start of the `tokens_per_s` window."""
        started: Future[InsideVllm] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(start, started), name="raypo-vllm", daemon=True
        )
        self._thread.start()
        self._inside = started.result()
        self.llm = self._inside.llm
        self._most_running, self._probes = self._inside.most_running - probes, probes

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
        answer: Future[T] = Future()
        where = self._news if is_urgent else self._calls
        self._hand_in(where, partial(settle, answer, function))
        return answer.result()

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
        assert threading.current_thread() is not self._thread, "what wakes it cannot wait for it"
        now = time.monotonic()
        asked = [
            RequestState(each, now + (each.timeout_s or math.inf), alone, self._take_back)
            for each in requests
        ]
        if alone:
            self._hand_in(self._news, partial(self._arrive, [*asked]))
            return asked
        for each in asked:
            left = None if each.deadline == math.inf else max(0.0, each.deadline - time.monotonic())
            needs_place = each.request.priority >= 0
            if needs_place and not self._places.acquire(timeout=left):
                each.set_result(completion_of((), (), "timeout"))
                continue
            each.has_place = needs_place
            try:
                self._hand_in(self._news, partial(self._arrive, [each]))
            except RuntimeError:
                if needs_place:
                    self._places.release()  # wakes the next blocked caller, which fails as well
                raise
        return asked

    def _take_back(self, request: RequestState) -> None:
        """Cancel a request before the next step. Does not block."""
        with suppress(RuntimeError):  # after shutdown every request has failed already
            give_back = partial(self.give_back, lambda each: each is request, "cancelled")
            self._hand_in(self._news, give_back)

    def cancel_other_attempts(self, run: str, attempt: str) -> int:
        """Cancel a run's requests of other attempts: queued, running, or still to arrive.

        Returns:
            Number of requests that were cancelled now.
        """

        def begin() -> int:
            self._attempts[run] = attempt
            return self.give_back(self._is_orphan, "cancelled")

        return self.call(begin, is_urgent=True)

    def stretch(self) -> Stretch:
        """Return means and peaks of the load since the last call of this method."""
        return self.call(self._meter.take, is_urgent=True)

    def _is_orphan(self, each: RequestState) -> bool:
        run, _, attempt = each.request.id.rpartition("/")
        return self._attempts.get(run, attempt) != attempt

    def give_up(self, reason: str) -> None:
        """Mark the engine as broken; every queued and running request then fails."""
        self.serving.broken = self.serving.broken or reason
        with self._door:
            self._door.notify()

    def close(self) -> None:
        """End the thread after the current step. Requests that are then unfinished fail.

        Waits at most `LEAVE_S` seconds for the thread.
        """
        with self._door:
            self._is_closing = True
            self._door.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_S)

    def _hand_in(self, where: list[Callable[[], object]], what: Callable[[], object]) -> None:
        with self._door:
            if self._is_closing:
                raise RuntimeError(self.serving.refusal() or "this engine was shut down.")
            where.append(what)
            self._door.notify()

    def settle(self) -> None:
        """Collect the outputs of steps in flight, which belong to the current weights.

        With asynchronous scheduling, as on GPUs, vLLM is one step ahead of its outputs.

        Raises:
            RuntimeError: vLLM failed.
        """
        if self._running:
            self._inside.settle(self._step)
        if self.serving.broken is not None:
            raise RuntimeError(self.serving.refusal())

    def give_back(self, are_meant: Callable[[RequestState], bool], reason: str) -> int:
        """Abort queued and running requests. Each future gets the tokens sampled so far.

        Args:
            are_meant: Predicate that selects the requests.
            reason: Finish reason of the aborted requests.

        Returns:
            Number of requests that were aborted.
        """
        waiting = (each for _, _, batch in self._queue for each in batch)
        everyone = (*waiting, *self._running.values())
        meant = [each for each in everyone if not each.done() and are_meant(each)]
        for each in meant:
            self._give_back(each, reason)
        return len(meant)

    def give_back_running(self, *, adapters: Collection[str | None] | None = None) -> None:
        """Abort running requests, with finish reason `paused` and the tokens sampled so far.

        Args:
            adapters: Adapters whose requests are aborted. An element None stands for requests
                under the engine's own weights. Without this argument, all running requests are
                aborted.
        """

        def are_meant(each: RequestState) -> bool:
            return each.name is not None and (adapters is None or each.request.adapter in adapters)

        self.give_back(are_meant, "paused")

    def restart_running(self, *, adapters: Collection[str | None] | None = None) -> None:
        """Drop the tokens of running requests and put the requests back into the queue.

        Args:
            adapters: Filter, as for `give_back_running`.
        """
        for each in list(self._running.values()):
            if adapters is not None and each.request.adapter not in adapters:
                continue
            self._withdraw(each)
            self._line_up([each])

    def forget_keys(self) -> bool:
        """Invalidate the KV cache of replaced weights.

        Running requests recompute their keys and values. If the pause has the policy `keep`, they
        continue with the old keys and values. New requests cannot reuse these.

        Returns:
            False if vLLM could not reset its prefix cache.
        """
        if self._running and self.serving.paused == "keep":
            # The cache cannot be reset under running requests; a new salt makes its entries miss.
            self._salt = str(next(self._numbers))
            return True
        self._salt = ""
        for each in self._running.values():
            self._count_preemptions(each)
        is_done = self._inside.forget_keys(of_running=bool(self._running))
        for each in self._running.values():
            # vLLM counts the reset as a preemption of each request; it is no sign of a full KV
            # cache.
            each.num_preemptions = each.scheduled.num_preemptions
        return is_done

    def note_version(self, adapter: str | None, version: int) -> None:
        """Record that running requests under an adapter continue with new weights.

        Args:
            adapter: Adapter that was replaced. None means the engine's own weights.
            version: The new version.
        """
        for each in self._running.values():
            if each.request.adapter == adapter:
                each.versions.append((each.scheduled.num_output_tokens, version))

    def runs(self, adapter: str) -> bool:
        """Return True if any request runs under this adapter."""
        return any(each.request.adapter == adapter for each in self._running.values())

    def _run(self, start: Callable[[], Any], started: Future[InsideVllm]) -> None:
        settle(started, lambda: InsideVllm(start()))
        if started.exception() is None:
            self._inside = started.result()
            while self._turn():
                pass

    def _turn(self) -> bool:
        """Run the queued functions, then one step if any request runs; return False once closed."""
        begin = time.monotonic()
        with self._door:
            self._door.wait_for(self._is_needed, self._seconds_left())
            if not self._running and not self._num_queued:
                self._meter.note_idle(time.monotonic() - begin)
            is_last = self._is_closing
            todo = list(self._news)
            self._news.clear()  # in place: `_hand_in` callers hold a reference to the list
            if is_last or not self._runs_alone:
                todo += self._calls
                self._calls.clear()
        try:
            with self.progress.at_work():
                for function in todo:
                    function()
                    self.progress.step()
                while self._seconds_left() == 0.0:
                    self._give_back(heapq.heappop(self._deadlines)[2], "timeout")
                self._admit()
                if self._running and self.serving.may_step():
                    self._step()
                self._look()
        except BaseException as error:
            self._break(error)
        if is_last:
            self.serving.broken = self.serving.broken or "it was shut down"
        if self.serving.broken is not None:
            self._fail_all()
        return not is_last

    def _is_needed(self) -> bool:
        has_requests = bool(self._running or self._queue)
        can_go_on = self.serving.may_step() or self.serving.broken is not None
        has_calls = bool(self._calls) and not self._runs_alone
        return self._is_closing or bool(self._news) or has_calls or (has_requests and can_go_on)

    def _seconds_left(self) -> float | None:
        """Return the seconds until the next deadline, or None if no request has a deadline."""
        while self._deadlines and self._deadlines[0][2].done():
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - time.monotonic())

    def _arrive(self, batch: list[RequestState]) -> None:
        refusal, is_paused = self.serving.refusal(), self.serving.paused is not None
        if refusal is not None and (self.serving.broken is not None or not is_paused):
            self._fail(batch, RuntimeError(refusal))
            return
        for each in filter(self._is_orphan, batch):  # its caller is dead
            self._give_back(each, "cancelled")
        batch = [each for each in batch if not each.done()]
        for each in batch:
            each.number = next(self._numbers)
            if each.deadline < math.inf:
                heapq.heappush(self._deadlines, (each.deadline, each.number, each))
        if batch:
            self._line_up(batch)

    def _line_up(self, batch: list[RequestState]) -> None:
        self._num_queued += len(batch)
        for each in batch:
            each.waits = True
        priority = min(each.request.priority for each in batch)
        heapq.heappush(self._queue, (priority, batch[0].number, batch))

    def _admit(self) -> None:
        """Move requests from the queue into vLLM, up to `max_num_seqs`.

        An exclusive batch waits until nothing runs; then it runs alone.
        """
        refusal = self.serving.refusal()
        if refusal is not None and self.serving.paused is None:
            for _, _, batch in self._queue:
                if batch[0].alone:  # a push began first; other requests stay queued
                    self._fail(batch, RuntimeError(refusal))
        entries: list[tuple[int, int, list[RequestState]]] = []
        admitted: list[RequestState] = []
        runs_alone = self._runs_alone
        while self._queue and not runs_alone and self.serving.may_step():
            priority, _, batch = self._queue[0]
            if batch := [each for each in batch if not each.done()]:
                most = self._most_running + (self._probes if priority < 0 else 0)
                runs_alone = batch[0].alone
                if len(self._running) + len(admitted) >= (1 if runs_alone else most):
                    break
                admitted += self._with_adapters(batch)
            entries.append(heapq.heappop(self._queue))
        try:
            if admitted:
                self._enter(admitted)
        except BaseException:
            for entry in entries:  # for `_fail_all`
                heapq.heappush(self._queue, entry)
            raise

    def _with_adapters(self, batch: list[RequestState]) -> list[RequestState]:
        """Return the requests of a batch, none if an adapter was dropped while they were queued."""
        try:
            for each in batch:
                if self.adapters and each.request.adapter:
                    self.adapters.request(each.request.adapter)
        except ValueError as error:
            self._fail(batch, error)
            return []
        return batch

    def _enter(self, batch: list[RequestState]) -> None:
        """Add requests to vLLM, all in one call."""
        self._leave_queue(batch)
        requests = [each.request for each in batch]
        held = self.adapters
        names = self._inside.enqueue(
            [vllm_prompt(request, self._salt) for request in requests],
            [sampling_params(request, self._placeholder_id) for request in requests],
            [held.request(r.adapter) if held and r.adapter else None for r in requests],
            [request.priority for request in requests],
        )
        for each, name in zip(batch, names, strict=True):
            adapter, version = each.request.adapter, self.serving.version
            if held and adapter and (of_adapter := held.version(adapter)) is not None:
                version = of_adapter
            assert version is not None
            each.name, each.versions = name, [(0, version)]
            each.scheduled, each.num_preemptions = self._inside.scheduled(name), 0
            if each.request.images:
                check_ids(each.request, each.scheduled.prompt_token_ids)
            if each.request.with_experts:
                each.scheduled.experts = []  # filled by `InsideVllm.record_experts`
            self._running[self._state(each).external_req_id] = each
        self._runs_alone = batch[0].alone

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
                each, said = self._running[output.request_id], output.outputs[0]
                tokens, log_probs = sampled(each.scheduled, said.logprobs)
                self._left(each, output.request_id, len(tokens))
                reason = said.finish_reason
                experts = getattr(each.scheduled, "experts", None)
                num_prompt = len(each.request.prompt_ids)
                each.set_result(
                    completion_of(tokens, log_probs, reason, each.versions, experts, num_prompt)
                )
        return True

    def _give_back(self, each: RequestState, reason: str) -> None:
        tokens, log_probs, experts = (), (), None
        if each.name is None:
            self._leave_queue([each])
        else:
            tokens, log_probs = self._withdraw(each)
            experts = getattr(each.scheduled, "experts", None)
        num_prompt = len(each.request.prompt_ids)
        each.set_result(
            completion_of(tokens, log_probs, reason, each.versions, experts, num_prompt)
        )

    def _withdraw(self, each: RequestState) -> tuple[Sequence[int], Sequence[float]]:
        """Abort a request in vLLM; return its tokens so far and their log-probs."""
        state = self._state(each)
        assert each.name is not None, "vLLM has it"
        self._inside.abort(each.name)
        tokens, log_probs = sampled(each.scheduled, state.logprobs_processor.logprobs)
        self._left(each, state.external_req_id, len(tokens))
        return tokens, log_probs

    def _left(self, each: RequestState, name: str, num_tokens: int) -> None:
        """Remove from `_running` a request that vLLM has finished or aborted."""
        self._count_preemptions(each)
        del self._running[name]
        each.name = None
        self._tokens += num_tokens
        self._runs_alone = self._runs_alone and bool(self._running)

    def _leave_queue(self, asked: Iterable[RequestState]) -> None:
        for each in asked:
            self._num_queued -= each.waits
            each.waits = False
            if each.has_place:
                each.has_place = False
                self._places.release()

    def _fail(self, asked: Iterable[RequestState], error: Exception) -> None:
        for each in asked:
            if not each.done():
                self._leave_queue([each])
                each.set_exception(error)

    def _break(self, error: BaseException) -> None:
        reason = f"vLLM failed while it sampled ({type(error).__name__}: {error})"
        self.serving.broken = self.serving.broken or reason
        self._fail_all(error)

    def _fail_all(self, cause: BaseException | None = None) -> None:
        for each in [
            *self._running.values(),
            *(each for _, _, batch in self._queue for each in batch),
        ]:
            error = RuntimeError(self.serving.refusal())
            error.__cause__ = cause
            self._fail([each], error)
        self._running.clear()
        self._queue.clear()
        self._runs_alone = False

    def _state(self, each: RequestState) -> Any:
        """Return vLLM's state of a running request (`InsideVllm.state`)."""
        assert each.name is not None, "vLLM has it"
        return self._inside.state(each.name)

    def _count_preemptions(self, each: RequestState) -> None:
        self._preemptions += each.scheduled.num_preemptions - each.num_preemptions
        each.num_preemptions = each.scheduled.num_preemptions

    def _look(self) -> None:
        """Update `load`.

        An update visits every running request. While requests run, it is therefore made at most
        every `LOOK_EVERY_S` seconds.
        """
        kv_cache = self._inside.kv_cache_use
        self._meter.note(queued=self._num_queued, running=len(self._running), kv_cache=kv_cache)
        now = time.monotonic()
        if self._running and now < self._looked_at + LOOK_EVERY_S:
            return
        self._looked_at = now
        tokens = self._tokens
        for each in self._running.values():
            tokens += each.scheduled.num_output_tokens
            self._count_preemptions(each)
        rate, (begin_s, begin_tokens) = self.load.tokens_per_s, self._rate_from
        if self._busy_s - begin_s >= RATE_OVER_S:
            rate = (tokens - begin_tokens) / (self._busy_s - begin_s)
            self._rate_from = self._busy_s, tokens
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
            tokens_per_s=rate,
        )
