"""Memory errors as torch and vLLM raise them come with what to change."""

import pytest
import torch

from raypo.cluster.actors import DeploymentError
from raypo.cluster.out_of_memory import (
    ENGINE_REMEDY,
    LEARNER_REMEDY,
    OutOfMemory,
    memory_advice,
)


def test_a_machine_without_the_memory():
    with (
        pytest.raises(OutOfMemory, match=r"learner worker 3 ran out of memory: .*allocate.*zero_"),
        memory_advice("learner worker 3", LEARNER_REMEDY),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        ValueError("No available memory for the cache blocks. Try increasing ..."),
        ValueError("Free memory on device (3/80 GiB) on startup is less than desired GPU memory "
                   "utilization (0.5, 40 GiB)."),
        ValueError("... KV cache is needed, which is larger than the available KV cache memory"),
    ],
)  # fmt: skip
def test_a_gpu_without_the_memory(error: Exception):
    with (
        pytest.raises(OutOfMemory, match=r"the engine ran out of memory: .*gpu_memory_fraction"),
        memory_advice("the engine", ENGINE_REMEDY),
    ):
        raise error


def test_other_errors_and_what_was_explained_already_pass_through():
    said = (
        ValueError("a wrong shape"),
        OutOfMemory("the engine ran out of memory: ..."),
        DeploymentError("raypo:run:engine: OutOfMemory: the engine ran out of memory: ..."),
    )
    for error in said:
        with pytest.raises(type(error)) as caught, memory_advice("learner", LEARNER_REMEDY):
            raise error
        assert caught.value is error
