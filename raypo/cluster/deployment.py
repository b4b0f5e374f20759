"""Replicas of a plain class behind one handle: Ray actors pinned to bundles of a shared group."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypo.cluster.actors import DeploymentError, start_named
from raypo.metrics.logs import log_to_file
from raypo.metrics.timeline import note_call


@dataclass(frozen=True)
class Deployment:
    """A plain class to run as replicas; `kwargs` are its constructor's arguments."""

    name: str
    """Readable, for the dashboard: raypo:<run>:<role>."""
    cls: type
    kwargs: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the replica's process."""
    logs_dir: str | None = None
    """Where replica i writes what libraries say, into <role>_<i>.log; None: to Ray's logs alone."""

    @property
    def role(self) -> str:
        """The last word of the name: engine, reference."""
        return self.name.split(":")[-1]


class Response:
    """An answer that is on its way."""

    def __init__(self, ref: Any, replica: str, method: str = "") -> None:
        self._ref, self._replica, self._method = ref, replica, method
        self._asked = time.time()

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait for the answer.

        Raises:
            DeploymentError: the replica died, or did not answer in `timeout_s` seconds.
            Exception: whatever the replica's method raised.
        """
        try:
            answer = ray.get(self._ref, timeout=timeout_s)
            note_call(self._replica, self._method, self._asked, time.time())
            return answer
        except RayActorError as error:
            raise DeploymentError(f"{self._replica}: the replica was lost: {error}") from error
        except GetTimeoutError:
            raise DeploymentError(
                f"{self._replica}: no answer in {timeout_s:g} s. Look at its log in the Ray "
                f"dashboard, or raise placement.timeout_s if it is still starting."
            ) from None


class _Method:
    def __init__(self, handle: DeploymentHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def remote(self, *args: Any, **kwargs: Any) -> Response:
        """Call the method on one replica."""
        return self._handle._call(self._handle._next(), self._name, args, kwargs)

    def on_all(self, *args: Any, **kwargs: Any) -> list[Response]:
        """Call the method on every replica."""
        replicas = range(len(self._handle.replicas))
        return [self._handle._call(index, self._name, args, kwargs) for index in replicas]


class DeploymentHandle:
    """Calls replicas: `handle.score.remote(rollouts).result()`.

    A worker prefers one replica (its own, where there is one) and so spreads the workers' calls.
    """

    def __init__(self, replicas: dict[str, ActorHandle], *, prefer: int = 0) -> None:
        self.replicas = replicas
        self._prefer = prefer

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_") and name != "__ray_ready__":
            raise AttributeError(name)
        return _Method(self, name)

    @classmethod
    def find(cls, names: list[str], *, prefer: int = 0) -> DeploymentHandle:
        """A handle to replicas that another worker has started."""
        return cls({name: ray.get_actor(name) for name in names}, prefer=prefer % len(names))

    def _next(self) -> int:
        return self._prefer

    def _call(self, index: int, method: str, args: tuple, kwargs: dict[str, Any]) -> Response:
        name, actor = list(self.replicas.items())[index]
        return Response(getattr(actor, method).remote(*args, **kwargs), name, method)


def start_replica(
    deployment: Deployment, index: int, group: PlacementGroup | None, *, bundle: int
) -> str:
    """Start one replica as a named actor and return its name; it starts in the background.

    It reserves nothing of its own: the group's bundle belongs to a learner worker, and the two
    take turns. Devices are the worker's own, by CUDA_VISIBLE_DEVICES.
    """
    name = f"{deployment.name}:{index}"
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "runtime_env": {"env_vars": {**deployment.env, **own_devices()}},
    }
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
        )
    cls = _logging_class(deployment, index)
    _keep_alive[name] = start_named(cls, name, options=options, kwargs=deployment.kwargs)
    return name


def _logging_class(deployment: Deployment, index: int) -> type:
    """The class, or one of its name that sends its process's log to a file of the run."""
    if deployment.logs_dir is None:
        return deployment.cls
    path = f"{deployment.logs_dir}/{deployment.role}_{index}.log"

    class Replica(deployment.cls):
        def __init__(self, **kwargs: Any) -> None:
            log_to_file(path)
            super().__init__(**kwargs)
            log_to_file(path)  # libraries that came in meanwhile have brought their own loggers

    Replica.__name__ = Replica.__qualname__ = deployment.cls.__name__
    return Replica


_keep_alive: dict[str, ActorHandle] = {}
"""Replicas end when nobody holds them: with the process that started them."""


def own_devices() -> dict[str, str]:
    """Environment that shows a process the devices of this worker and no others."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    if not ids:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(ids),
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    }
