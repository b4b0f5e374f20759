"""The processes of one vLLM: this one, and on several devices one more for each."""

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
    """What one worker answers to one call: a value or its failure."""

    value: Any = None
    failure: Exception | None = None


class VllmProcesses:
    """Asks vLLM's workers, and knows when they can never be asked again.

    vLLM (0.32) raises the first failure that it reads, and takes those of the other workers for
    their answers to the next call. So the methods of `WorkerExtension` answer with their failures,
    and after a failure of vLLM's own in several processes these cannot go on.
    """

    def __init__(self, llm: Any) -> None:
        """Take the workers of a `vllm.LLM` that has started."""
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
        """What a method of vLLM's worker returns in every worker, or the first failure."""
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
        """Around a call that vLLM makes of its workers and that may fail."""
        try:
            yield
        except ValueError:  # wrong input, which no worker has seen
            raise
        except Exception as error:
            if self._are_several or self._llm.llm_engine.has_unfinished_requests():
                self._out_of_step = f"vLLM is out of step after a failure ({error})"
            raise

    def why_broken(self) -> str | None:
        """Why none of them can be asked again; None while all can."""
        if getattr(self._llm.llm_engine.model_executor, "is_failed", False):
            return "one of vLLM's processes has ended"
        return self._out_of_step

    def peak_memory(self) -> dict[str, float]:
        """The most memory that they have held, in GB: RAM of all, GPU memory of the fullest.

        The RAM of several is an upper bound: their peaks need not come together, and what they
        share is counted in each.
        """
        peaks = [peak_memory()]
        if self._are_several:
            peaks += self.ask("raypo_peak_memory")
        memory = {"memory": sum((peak["memory"] for peak in peaks), 0.0)}
        of_gpus = [peak["gpu_memory"] for peak in peaks if "gpu_memory" in peak]
        return memory | ({"gpu_memory": max(of_gpus)} if of_gpus else {})


def leave_no_shared_memory(maps: Path = Path("/proc/self/maps")) -> None:
    """Take away the names of what vLLM's processes share, once all of them have it open.

    Message queues, and on CPU what collectives are made in. The memory then ends with the last of
    the processes; else it stays where they are killed.
    """
    if not maps.exists():
        return
    for name in set(re.findall(r"/dev/shm/(?:psm|vllm_dist)_\S+$", maps.read_text(), re.MULTILINE)):
        with suppress(FileNotFoundError):
            os.unlink(name)
