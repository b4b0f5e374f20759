"""Environment variables that make devices visible to a process.

Ray sets them in each worker. If the user sets a NOSET flag, Ray keeps the user's value.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping, Sequence

from raypo.config import ConfigError

NOSET = {
    "CUDA_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
}
"""Maps each visibility variable to the flag that prevents Ray from setting it."""


def user_visibility_env(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the NOSET flags that the user has set, and the visibility variables they protect."""
    env = {}
    for variable, flag in NOSET.items():
        if _is_set(environ, flag):
            env[flag] = environ[flag]
            if variable in environ:
                env[variable] = environ[variable]
    return env


SHARED_MEMORY = "/dev/shm"
MIN_SHARED_BYTES = 10**9
"""Minimum size of `SHARED_MEMORY` for several GPUs. Docker's default is 64 MB. vLLM maps 160 MB per
sharded engine, and NCCL needs some for each pair of GPUs. If there is too little, a process is
killed by SIGBUS."""
BFLOAT16_CAPABILITY = (8, 0)
"""Minimum CUDA compute capability that supports bfloat16."""
UNSUPPORTED_ACCELERATORS = ("NPU", "TPU", "HPU", "neuron_cores")
"""Accelerators that raypo does not support, by the names of Ray's resources."""


def check_accelerators(resources: Mapping[str, float]) -> None:
    """Check that a run on CPUs would not leave unsupported accelerators of the cluster idle.

    Args:
        resources: Ray's resources of the cluster. AMD GPUs count as `GPU`, too.

    Raises:
        ConfigError: the cluster has unsupported accelerators and no GPU.
    """
    unsupported = [name for name in UNSUPPORTED_ACCELERATORS if resources.get(name)]
    if unsupported and not resources.get("GPU"):
        raise ConfigError(
            f"learner.use_gpu (auto): the cluster has {unsupported[0]}, but raypo runs only on "
            "GPUs and CPUs. Set learner.use_gpu to false to run on its CPUs, or use a cluster with "
            "GPUs."
        )


def check_driver(*, gpus: int, use_gpu: bool | str = "auto", machine: str = "this machine") -> None:
    """Check that torch can use the GPUs. Otherwise the run would silently use CPUs.

    Args:
        gpus: Number of GPUs that nvidia-smi or Ray finds.
        use_gpu: `learner.use_gpu`. With auto, a CPU build of torch is accepted, because it means
            that the user chose to run on CPUs.
        machine: Name of the machine, for the message.

    Raises:
        ConfigError: torch finds no GPU.
    """
    import torch

    chose_cpus = use_gpu == "auto" and torch.version.cuda is None
    if not gpus or chose_cpus or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()  # raises with the reason why torch cannot use the GPUs
        reason = "it finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    raise ConfigError(
        f"learner.use_gpu ({use_gpu}): {machine} has {gpus} GPU{'s' * (gpus > 1)}, and torch "
        f"{torch.__version__} (CUDA {torch.version.cuda}) cannot use them: {reason}. Update the "
        f"driver, install a torch for the driver's CUDA, or set learner.use_gpu to false to run on "
        f"CPUs."
    )


def check_granted(num_workers: int = 1) -> None:
    """Check that this learner worker can use the GPUs that Ray has assigned to it.

    Args:
        num_workers: Number of learner workers.

    Raises:
        ConfigError: torch finds no GPU, or there is too little shared memory for several GPUs.
    """
    import ray

    context = ray.get_runtime_context()
    gpu_ids = context.get_accelerator_ids().get("GPU", [])
    node = ray.util.get_node_ip_address()
    check_driver(gpus=len(gpu_ids), use_gpu=True, machine=f"a worker on {node}")
    if gpu_ids and num_workers > 1:
        check_shared_memory()


def check_shared_memory() -> None:
    """Check that the machine or container has enough shared memory for several GPUs.

    Raises:
        ConfigError: `SHARED_MEMORY` is smaller than `MIN_SHARED_BYTES`.
    """
    size = shutil.disk_usage(SHARED_MEMORY).total
    if size < MIN_SHARED_BYTES:
        raise ConfigError(
            f"{SHARED_MEMORY} ({size / 1e9:.3g} GB on {socket.gethostname()}): the processes of "
            f"several GPUs need at least {MIN_SHARED_BYTES / 1e9:g} GB of shared memory. Start "
            "the container with --shm-size=16g or --ipc=host; on Kubernetes mount an emptyDir with "
            f"`medium: Memory` at {SHARED_MEMORY}."
        )


def check_capability(dtype: str) -> None:
    """Check that the GPU supports `dtype`. Call this in a process that can see the GPU.

    Raises:
        ConfigError: the GPU's compute capability is too low.
    """
    import torch

    if dtype != "bfloat16" or torch.version.cuda is None or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if capability < BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"model.dtype (bfloat16): {torch.cuda.get_device_name()} has compute capability "
            f"{capability[0]}.{capability[1]}, and bfloat16 needs 8.0, an A100 or newer. Use other "
            "GPUs, or set model.dtype to float32."
        )


def check_noset_flags(*, has_devices: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Check that no NOSET flag leaves Ray Train's workers without devices.

    Args:
        has_devices: Whether the cluster has accelerators.
        environ: Environment variables.

    Raises:
        ConfigError: a flag is set, but its visibility variable is not.
    """
    for variable, flag in NOSET.items():
        if has_devices and _is_set(environ, flag) and not environ.get(variable):
            raise ConfigError(
                f"{flag} ({environ[flag]}): with this flag Ray does not set {variable} for "
                f"workers, but Ray Train reads their devices from it. Set {variable} to all "
                f"devices of a node (like 0,1,2,3), or unset {flag}."
            )


def visibility_env(ids: list[str], *, is_rocm: bool = False) -> dict[str, str]:
    """Return the variables that make these devices visible to a process, overriding Ray.

    Args:
        ids: Ray's device ids on the node. Without ids, the result is empty.
        is_rocm: Whether torch was built for ROCm.
    """
    if not ids:
        return {}
    variable = "HIP_VISIBLE_DEVICES" if is_rocm else "CUDA_VISIBLE_DEVICES"
    return {variable: ",".join(ids), NOSET[variable]: "1"}


def visible_device_env(
    ids: Sequence[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that hide all devices that Ray has not reserved for this process.

    Only variables with a NOSET flag are returned. Without the flag, Ray has set the variable
    itself. With the flag, the variable still lists all devices of the node.

    Args:
        ids: Devices that Ray has reserved for the process. Without ids, the result is empty: such a
            process shares a learner worker's devices, which are set explicitly.
        environ: Environment variables.
    """
    return {
        variable: ",".join(ids)
        for variable, flag in NOSET.items()
        if ids and variable in environ and _is_set(environ, flag)
    }


def merged_visibility_env(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Merge environments of `visibility_env` into one with all their devices, in this order."""
    first, *_ = environments
    merged = {
        variable: ",".join(environment[variable] for environment in environments)
        for variable in NOSET
        if variable in first
    }
    return {**first, **merged}


def _is_set(environ: Mapping[str, str], flag: str) -> bool:
    return environ.get(flag, "").lower() in ("1", "true")
