"""State of a request inside an engine, from its arrival to its completion."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from raypo.serving.requests import Completion, SamplingRequest


class RequestState(Future[Completion]):
    """A request and the future of its completion. `cancel` aborts the request in the engine."""

    def __init__(
        self,
        request: SamplingRequest,
        deadline: float,
        alone: bool,
        request_abort: Callable[[RequestState], None],
    ) -> None:
        """Wrap a request that is not queued yet.

        Args:
            request: The request.
            deadline: Time on the clock of `time.monotonic`. inf means no timeout.
            alone: Whether it belongs to an exclusive batch.
            request_abort: Callback that aborts the request without blocking. Called in any thread.
        """
        super().__init__()
        self.request, self.deadline, self.alone = request, deadline, alone
        self.arrival = 0
        """Order of arrival."""
        self.has_queue_slot = False
        """True while it holds a slot of the queue's semaphore."""
        self.is_queued = False
        """True while it is queued."""
        self.vllm_id: str | None = None
        """vLLM's internal request id, or None if vLLM does not hold the request."""
        self.versions: list[tuple[int, int]] = []
        """One pair (index of the first token, version) for each weight version it ran under."""
        self.scheduled: Any = None
        """The scheduler's request object, kept to read `num_preemptions` after the request ends."""
        self.num_preemptions = 0
        """Preemptions that are already added to the engine's count."""
        self._request_abort = request_abort
        # A running future ignores `Future.cancel`. The loop resolves it with the tokens so far.
        self.set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Abort the request before the next step; the future then gets its tokens so far.

        Returns:
            False, as for any running future.
        """
        self._request_abort(self)
        return super().cancel()
