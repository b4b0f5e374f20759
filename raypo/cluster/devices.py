"""Which devices a process sees, and who says so: Ray, or the user by a NOSET flag."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from raypo.config import ConfigError

NOSET = {
    "CUDA_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES": "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
}
"""Variable of a kind of accelerator -> flag by which Ray leaves it alone."""


def users_choice(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The flags that the user has set, with the devices shown instead; workers get both."""
    chosen = {}
    for variable, flag in NOSET.items():
        if _is_set(environ, flag):
            chosen[flag] = environ[flag]
            if variable in environ:
                chosen[variable] = environ[variable]
    return chosen


BFLOAT16_CAPABILITY = (8, 0)
OTHERS = ("NPU", "TPU", "HPU", "neuron_cores")
"""Accelerators as Ray names them, that raypo has no engine and no learner for."""


def check_accelerators(resources: Mapping[str, float]) -> None:
    """Refuse a cluster whose accelerators would stand idle while all runs on CPUs.

    Args:
        resources: Of the cluster, as Ray names them. AMD's GPUs are `GPU` too.

    Raises:
        ConfigError: it has some that are no GPUs, and no GPU.
    """
    found = [name for name in OTHERS if resources.get(name)]
    if found and not resources.get("GPU"):
        raise ConfigError(
            f"learner.use_gpu (auto): the cluster has {found[0]}, and raypo runs on GPUs and CPUs. "
            f"Set learner.use_gpu to false to run on its CPUs, or use a cluster with GPUs."
        )


def check_driver(*, gpus: int, use_gpu: bool | str = "auto", where: str = "this machine") -> None:
    """Refuse GPUs that torch cannot use, which else would go by without a word: all runs on CPUs.

    Args:
        gpus: Those that nvidia-smi or Ray finds there.
        use_gpu: `learner.use_gpu`; where it is auto, a torch that is built for CPUs is a choice.

    Raises:
        ConfigError: torch finds none of them.
    """
    import torch

    is_choice = use_gpu == "auto" and torch.version.cuda is None
    if not gpus or is_choice or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        reason = "it finds no device"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
    raise ConfigError(
        f"learner.use_gpu ({use_gpu}): {where} has {gpus} GPU{'s' * (gpus > 1)}, and torch "
        f"{torch.__version__} (CUDA {torch.version.cuda}) cannot use them: {reason}. Update the "
        f"driver, install a torch for the driver's CUDA, or set learner.use_gpu to false to run on "
        f"CPUs."
    )


def check_granted() -> None:
    """The same on a learner worker, of the GPUs that Ray has given it.

    Raises:
        ConfigError: torch finds none of them.
    """
    import ray

    context = ray.get_runtime_context()
    given = context.get_accelerator_ids().get("GPU", [])
    node = ray.util.get_node_ip_address()
    check_driver(gpus=len(given), use_gpu=True, where=f"a worker on {node}")


def check_capability(dtype: str) -> None:
    """Refuse a GPU that has no bfloat16; called in a process that is to compute on it.

    Raises:
        ConfigError: its compute capability is too low.
    """
    import torch

    if dtype != "bfloat16" or torch.version.cuda is None or not torch.cuda.is_available():
        return
    found = torch.cuda.get_device_capability()
    if found < BFLOAT16_CAPABILITY:
        raise ConfigError(
            f"model.dtype (bfloat16): {torch.cuda.get_device_name()} has compute capability "
            f"{found[0]}.{found[1]}, and bfloat16 needs 8.0, an A100 or younger. Use other GPUs, "
            f"or set model.dtype to float32."
        )


def check_choice(*, has_devices: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a flag that would leave Ray Train's workers without a device.

    Args:
        has_devices: The cluster has accelerators.

    Raises:
        ConfigError: a flag is set, and its variable is not.
    """
    for variable, flag in NOSET.items():
        if has_devices and _is_set(environ, flag) and not environ.get(variable):
            raise ConfigError(
                f"{flag} ({environ[flag]}): Ray shows no worker its devices, and Ray Train looks "
                f"for them in {variable}. Set {variable} to all devices of a node (like 0,1,2,3), "
                f"or unset {flag}."
            )


def shown(ids: list[str], *, is_rocm: bool = False) -> dict[str, str]:
    """Environment that shows a process these devices, whatever Ray would show it.

    Args:
        ids: As Ray numbers the devices of the node; none: nothing is said.
        is_rocm: torch was built for ROCm.
    """
    if not ids:
        return {}
    variable = "HIP_VISIBLE_DEVICES" if is_rocm else "CUDA_VISIBLE_DEVICES"
    return {variable: ",".join(ids), NOSET[variable]: "1"}


def narrowed(ids: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a process that a NOSET flag shows all devices, for those that are its own.

    Args:
        ids: What Ray has reserved for it; none: it takes turns on devices that it was told.
    """
    return {
        variable: ",".join(ids)
        for variable, flag in NOSET.items()
        if ids and variable in environ and _is_set(environ, flag)
    }


def together(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Environment that shows a process the devices of several (`shown`), in that order."""
    first, *_ = environments
    joined = {
        variable: ",".join(environment[variable] for environment in environments)
        for variable in NOSET
        if variable in first
    }
    return {**first, **joined}


def _is_set(environ: Mapping[str, str], flag: str) -> bool:
    return environ.get(flag, "").lower() in ("1", "true")
