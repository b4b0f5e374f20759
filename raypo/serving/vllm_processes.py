"""Calls to vLLM's workers: this process on one device, one worker process for each of several."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypo.metrics.process_memory import peak_memory


@dataclass(frozen=True)
class Answer:
    """Result of one call in one worker: a value or an exception."""

    value: Any = None
    failure: Exception | None = None


class VllmProcesses:
    """Caller of vLLM's workers, which also tracks whether they are still usable.

    vLLM (0.32) raises the first failure that it reads, and mistakes those of the other workers for
    their replies to the next call. Methods of `WorkerExtension` therefore return their failures.
    After a failure in one of vLLM's own methods, several worker processes are unusable.
    """

    def __init__(self, llm: Any) -> None:
        """Set up the workers of a `vllm.LLM` that has started."""
        self._llm = llm
        self._are_several = llm.llm_engine.vllm_config.parallel_config.world_size > 1
        self._out_of_step: str | None = None
        if self._are_several:
            self.ask("raypo_end_with", os.getpid())
            self.ask("raypo_leave_no_shared_memory")
            leave_no_shared_memory()
        if llm.llm_engine.model_config.enable_sleep_mode:
            self.ask("raypo_share_device")

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method in every worker and return the values.

        Raises:
            Exception: the first worker's failure.
        """
        with self.vllms_own_call():
            answers: list[Answer] = self._llm.collective_rpc(
                "raypo_answer", args=(method, *arguments)
            )
        for answer in answers:
            if answer.failure is not None:
                raise answer.failure
        return [answer.value for answer in answers]

    @contextmanager
    def vllms_own_call(self) -> Iterator[None]:
        """Wrap a call of vLLM's own to its workers, and mark them as unusable if it fails."""
        try:
            yield
        except ValueError:  # invalid input, rejected before it reached a worker
            raise
        except Exception as error:
            if self._are_several or self._llm.llm_engine.has_unfinished_requests():
                self._out_of_step = f"vLLM is out of step after a failure ({error})"
            raise

    def why_broken(self) -> str | None:
        """Return why the workers are unusable. None means they are usable."""
        if getattr(self._llm.llm_engine.model_executor, "is_failed", False):
            return "one of vLLM's processes has ended"
        return self._out_of_step

    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory in GB: RAM summed over processes, GPU memory of the fullest GPU.

        With several processes the RAM is an upper bound: their peaks need not coincide, and shared
        memory is counted in each.
        """
        peaks = [peak_memory()]
        if self._are_several:
            peaks += self.ask("raypo_peak_memory")
        memory = {"memory": sum((peak["memory"] for peak in peaks), 0.0)}
        of_gpus = [peak["gpu_memory"] for peak in peaks if "gpu_memory" in peak]
        return memory | ({"gpu_memory": max(of_gpus)} if of_gpus else {})


def leave_no_shared_memory(maps: Path = Path("/proc/self/maps")) -> None:
    """Unlink the shared memory of vLLM's processes, once all of them have it open.

    It holds message queues and, on CPU, buffers of collectives. Unlinked memory is freed with the
    last process; otherwise it would leak if the processes were killed.

    Args:
        maps: Memory map of this process, from which the names are read.
    """
    if not maps.exists():
        return
    for name in set(re.findall(r"/dev/shm/(?:psm|vllm_dist)_\S+$", maps.read_text(), re.MULTILINE)):
        with suppress(FileNotFoundError):
            os.unlink(name)
