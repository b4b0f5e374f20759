"""Connect to a Ray cluster, or start a local one with its dashboard."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import ray

from raypo.cluster.devices import check_noset_flags, user_visibility_env
from raypo.cluster.machine import (
    PROBE_TIMEOUT_S,
    check_address,
    check_folders,
    cluster_address,
    connection_error,
    saved_token,
)
from raypo.concurrency import settle
from raypo.config import ClusterSection, ConfigError
from raypo.ray_internals import (
    CLUSTER_ID,
    JOB_CONFIG_VARIABLE,
    address_file,
    dashboard_address,
    is_driver,
    on_loopback,
    reload_environment,
)
from raypo.tracking.console import Console

_WORKER_DEFAULTS = {
    "NCCL_DEBUG": "WARN",
    # This disables NVLS, but saves memory that NCCL otherwise uses with CUDA graphs. NCCL 2.22 is
    # said to fix this (nccl#1234), but SkyRL removed the setting and then restored it (SkyRL#1629).
    "NCCL_CUMEM_ENABLE": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Hide GPUs from workers that request none, as Ray did before 2.60. Otherwise they would use
    # one.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
    # On CPU, the processes of learner, engine and reference model share cores. By default, idle
    # OpenMP threads spin and block the other processes (sampling was 20 times slower). PASSIVE
    # makes idle threads sleep. GOMP_SPINCOUNT lets them spin briefly first, because a forward pass
    # of thousands of small matmuls is slow if it has to wake its threads for each one.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "20000",
}
_FORWARDED_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "PYTORCH_", "VLLM_", "HF_"),
    *("TORCHINDUCTOR_", "TRITON_"),
)
"""Prefixes of the driver's environment variables that are passed to workers."""
_NODE_SPECIFIC = {"VLLM_HOST_IP", "VLLM_HOST_PORT"}
"""Variables that match `_FORWARDED_PREFIXES` but differ between nodes, so they are not passed."""
_SECRET_SUFFIXES = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
"""Suffixes of secret variables (HF_TOKEN, VLLM_API_KEY). They are not passed, because a job's
variables are public. Settings like HF_HUB_DISABLE_IMPLICIT_TOKEN are not secret."""
_LOCAL_DEFAULTS = {
    # A local machine is never preempted. The watcher is a process that imports ray.train, which
    # takes seconds on a small machine.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_DRIVER_DEFAULTS = {
    # Show runs and their workers in Ray's dashboard (/api/train/v2/runs/v1). The actor that stores
    # this state uses 2 to 4 s of CPU time.
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",
    # `ray.train.report` blocks until the controller has polled the previous report, so a step takes
    # at least this interval. Ray's default is 2 s. A poll costs about a millisecond.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}


_connected_job = ""
"""Identity (`_current_job`) of the Ray job that `connect` started in this process. Such a job
passes raypo's variables to its workers. Empty if `connect` has not started a job."""
_connect_lock = threading.Lock()
"""Lock held while a thread connects, because `ray.init` must not run twice at the same time. A
trainer may connect while the thread of `connected_in_background` is also connecting."""


class ClusterError(RuntimeError):
    """Ray could not be started."""


@contextmanager
def connected_in_background(section: ClusterSection) -> Iterator[Future[bool]]:
    """Connect to Ray in a thread, because it takes seconds, and disconnect when the context ends.

    Yields the future of `connect`. The caller must wait for it before using Ray.
    """
    is_new_connection: Future[bool] = Future()
    is_interrupted, stop_event = False, threading.Event()

    def connect_until_stopped() -> None:
        settle(is_new_connection, partial(connect, section))
        # Keep the thread alive: Linux kills the processes of a local Ray when the thread that
        # started them ends.
        stop_event.wait()

    threading.Thread(target=connect_until_stopped, name="raypo-connect", daemon=True).start()
    try:
        yield is_new_connection
    except KeyboardInterrupt:  # do not wait for the connection
        is_interrupted = True
        raise
    finally:
        if is_new_connection.done() or not is_interrupted:
            with suppress(Exception):  # the caller has already received this error
                if is_new_connection.result():
                    ray.shutdown()
        stop_event.set()


def connect(section: ClusterSection) -> bool:
    """Connect to Ray: reuse the current connection, else join the address, else start a local Ray.

    Prints a line with the Ray that is used.

    Returns:
        True if this call opened the connection, so that the caller has to close it.

    Raises:
        ConfigError: no Ray responds at the address, it refuses the token, or a folder that a local
            Ray needs is not writable.
        ClusterError: a local Ray did not start in time.
    """
    with _connect_lock:
        return _connect(section)


def _connect(section: ClusterSection) -> bool:
    global _connected_job
    if ray.is_initialized():
        if _current_job() != _connected_job:
            _set_defaults(_DRIVER_DEFAULTS)
            _print_connection("to which this program had connected")
        return False
    address, source = cluster_address(section)
    local_address, is_auto = _local_ray_address(), address == "auto"
    if is_auto and local_address:
        # Probe this address below: Ray itself would hang if the address file is stale.
        address, source = local_address, f"{source}=auto"
    if address:
        check_address(address, source)
        _authenticate(address, source)
        init_options = {
            "address": address,
            "runtime_env": {"env_vars": _env_missing_from_job(os.environ)},
        }
    else:
        if local_address and connection_error(local_address) is None:
            Console().message(
                "raypo: starting a new Ray beside the one that runs on this machine "
                f"({local_address}); cluster.address=auto uses the running one"
            )
        check_folders()
        # Processes of a local Ray inherit variables; a runtime_env would cost each process a
        # second.
        os.environ.update(worker_environment())
        _set_defaults(_LOCAL_DEFAULTS)
        init_options = {"address": "local", "include_dashboard": True}
    _set_defaults(_DRIVER_DEFAULTS)
    try:
        with nullcontext() if address else on_loopback():
            ray.init(
                namespace=section.namespace,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **init_options,
            )
    except ConnectionError as error:  # `auto`, but no Ray runs on this machine
        first_line = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{source} ({address}): no cluster was found ({first_line}). Start one (ray start "
            f"--head), give its host:port, or leave the address out for a local Ray."
        ) from None
    except Exception as error:
        if "timed out during startup" not in str(error):  # Ray raises a plain Exception
            raise
        raise ClusterError(
            "Ray did not start on this machine within 30 seconds, Ray's own limit. Run the command "
            "again when fewer other programs keep the cores busy, or use a cluster that is running "
            "(cluster.address)."
        ) from None
    try:
        check_noset_flags(has_devices=ray.cluster_resources().get("GPU", 0.0) > 0.0)
    except ConfigError:
        ray.shutdown()
        raise
    _print_connection(_describe_connection(address, source, is_auto=is_auto))
    _connected_job = _current_job()
    return True


def _describe_connection(address: str | None, source: str, *, is_auto: bool) -> str:
    if is_auto:
        key = source.removesuffix("=auto")
        return f"which runs on this machine; without {key}, raypo starts a new one"
    return f"of {source}" if address else "started here"


def _print_connection(description: str) -> None:
    """Print which Ray is used, unless this process is an actor, such as a trial of a sweep."""
    if is_driver():
        Console().message(f"raypo: Ray at {ray.get_runtime_context().gcs_address}, {description}")


def _local_ray_address() -> str | None:
    """Return the address of the last `ray start` on this machine. This Ray may have stopped."""
    try:
        return address_file().read_text().strip() or None
    except OSError:
        return None


def worker_environment() -> dict[str, str]:
    """Return the environment variables of workers. The user's values override the defaults."""
    forwarded = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_FORWARDED_PREFIXES)
        and name not in _NODE_SPECIFIC
        and ("_DISABLE_" in name or not name.endswith(_SECRET_SUFFIXES))
    }
    defaults = {name: os.environ.get(name, value) for name, value in _WORKER_DEFAULTS.items()}
    return forwarded | defaults | user_visibility_env()


def missing_environment() -> dict[str, str]:
    """Return the part of `worker_environment` that Ray's job does not pass to new processes.

    It is empty if `connect` started the job. If other code called `ray.init`, it contains the
    variables that the job lacks.
    """
    if not ray.is_initialized() or _current_job() == _connected_job:
        return {}
    context = ray.get_runtime_context()
    is_driver = context.get_actor_id() is None
    job_env = (context.runtime_env.get("env_vars") or {}) if is_driver else os.environ
    return {name: value for name, value in worker_environment().items() if name not in job_env}


def _current_job() -> str:
    context = ray.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


def dashboard_url() -> str | None:
    """Return the URL of the connected cluster's Ray dashboard, or None if it has none."""
    url = dashboard_address()
    return url if not url or "://" in url else f"http://{url}"


def _set_defaults(defaults: Mapping[str, str]) -> None:
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _env_missing_from_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the worker variables that `ray job submit` has not set. Ray refuses duplicates."""
    job = json.loads(environ.get(JOB_CONFIG_VARIABLE, "{}"))
    job_env = job.get("runtime_env", {}).get("env_vars", {})
    return {name: value for name, value in worker_environment().items() if name not in job_env}


def dashboard_token() -> str | None:
    """Return the token of Ray's dashboard. None if no token is needed, or if none was found."""
    return saved_token() if os.environ.get("RAY_AUTH_MODE") == "token" else None


def _authenticate(address: str, source: str) -> None:
    """Enable Ray's token mode if the cluster requires a token.

    Ray enables this mode on its own only for the address `auto`. For host:port, it would retry
    without a token for 20 s.
    """
    if address in ("auto", "local"):
        return
    if os.environ.get("RAY_USE_TLS", "0") != "0" or "RAY_ENABLE_K8S_TOKEN_AUTH" in os.environ:
        return  # the probe below supports neither TLS nor Kubernetes tokens
    if _accepts_token(address, source, token=None):
        return
    token, mode = saved_token(), os.environ.get("RAY_AUTH_MODE")
    if token is None:
        raise ConfigError(
            f"{source} ({address}): this Ray requires a token, but none is set. Set "
            "RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node."
        )
    if not _accepts_token(address, source, token=token):
        raise ConfigError(
            f"{source} ({address}): this Ray requires a different token from the one that was "
            "found (RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token). Set "
            "RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node."
        )
    if mode not in (None, "token"):
        raise ConfigError(
            f"RAY_AUTH_MODE ({mode}): the Ray at {address} requires a token. Set it to token."
        )
    os.environ["RAY_AUTH_MODE"] = "token"
    reload_environment()


def _accepts_token(address: str, source: str, *, token: str | None) -> bool:
    """Return True if the Ray head at an address accepts a token. None means no token.

    This calls gRPC directly, because Ray's own client would retry.
    """
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        cluster_id: Any = channel.unary_unary(CLUSTER_ID)
        try:
            cluster_id(b"", timeout=PROBE_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.UNAUTHENTICATED:
                return False
            if code != grpc.StatusCode.DEADLINE_EXCEEDED:  # after a timeout, the head may be busy
                raise ConfigError(
                    f"{source} ({address}): the service there is not the head node of a Ray "
                    f"cluster ({code.name}). Give the address that `ray start --head` printed; "
                    "its port is 6379 by default."
                ) from None
    return True
