"""Step 2: vLLM engines and frozen models, started beside the learner workers by these, or by the
driver in a group of their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.util
import torch
from ray.util.placement_group import PlacementGroup

from raypo.cluster.actors import DeploymentError
from raypo.cluster.deployment import (
    Deployment,
    DeploymentHandle,
    Place,
    own_devices,
    start_deployment,
)
from raypo.cluster.devices import together
from raypo.cluster.placement import PlacementError, own_bundle
from raypo.cluster.reserve import Dedicated, nodes_of, reserve
from raypo.collectives import Workers
from raypo.config import PolicyLoraSection, PPOConfig, SFTConfig
from raypo.plan.dedicated import DedicatedBundle, dedicated_bundles
from raypo.serving.engine import Engine
from raypo.serving.reference import ReferenceModel
from raypo.serving.reward_model import RewardModel


@dataclass(frozen=True)
class Services:
    """Handles to what samples and judges."""

    engine: DeploymentHandle
    reference: DeploymentHandle | None
    reward_models: tuple[DeploymentHandle, ...] = ()
    """One deployment a model, in the order of `model.reward`."""

    def peak_memory(self) -> dict[str, list[dict[str, float]]]:
        """By role, what `raypo.metrics.process_memory` says in each replica that answers."""
        roles: dict[str, DeploymentHandle | None] = {
            "engine": self.engine,
            "reference": self.reference,
        }
        roles |= {f"reward_{number}": each for number, each in enumerate(self.reward_models)}
        asked = {role: each.peak_memory.on_all() for role, each in roles.items() if each}
        peaks: dict[str, list[dict[str, float]]] = {role: [] for role in asked}
        for role, answers in asked.items():
            for answer in answers:
                with suppress(DeploymentError):  # a lost replica is told by what needs it
                    peaks[role].append(answer.result())
        return peaks

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started.

        Raises:
            DeploymentError: one failed to start, with its error, or took too long.
        """
        for handle in filter(None, (self.engine, self.reference, *self.reward_models)):
            handle.wait(timeout_s)


def start_dedicated(config: PPOConfig, run_name: str, *, logs_dir: str, use_gpu: bool) -> Dedicated:
    """Reserve the dedicated group and start the roles that live in it; the driver calls it.

    Args:
        config: With absolute paths.

    Raises:
        PlacementError: the group was not free within `placement.timeout_s`.
    """
    bundles = dedicated_bundles(config, use_gpu=use_gpu)
    if not bundles:
        return Dedicated()
    placement = config.placement
    group = reserve(
        [bundle.resources for bundle in bundles],
        name=f"raypo:{run_name}:dedicated",
        strategy=placement.strategy,
        timeout_s=placement.timeout_s,
        guests=[", ".join(map(str, bundle.guests)) for bundle in bundles],
    )
    dedicated = Dedicated(group=group)
    places = places_in(group, bundles)
    threads = placement.cpus_per_bundle
    try:
        for role in _roles(config, engine_threads=threads, frozen_threads=threads):
            if role.name in places:
                deployment = _settled(role, config, run_name, logs_dir)
                dedicated.handles[role.name] = start_deployment(deployment, places[role.name])
    except BaseException:
        dedicated.shutdown(graceful=False)
        raise
    return dedicated


def places_in(group: PlacementGroup, bundles: Sequence[DedicatedBundle]) -> dict[str, list[Place]]:
    """By role, the place of each replica, in the order of their numbers."""
    places: dict[str, list[Place]] = {}
    for index, bundle in enumerate(bundles):
        for guest in bundle.guests:
            places.setdefault(guest.role, []).append(Place(group, index, num_gpus=guest.gpus))
    return places


def start_deployments(
    config: PPOConfig,
    run_name: str,
    workers: Workers,
    *,
    logs_dir: str,
    dedicated: Mapping[str, DeploymentHandle],
) -> Services:
    """Start in the workers' own placement group what the driver has not started; all call it.

    Engine i lives beside worker i; reference and reward models beside worker 0. All start in the
    background.

    Args:
        dedicated: What the driver has started, by role.
    """
    roles = _roles(
        config,
        engine_threads=_engine_threads(config, workers),
        frozen_threads=config.learner.cpus_per_worker,
    )
    colocated = [role for role in roles if role.name not in dedicated]
    started = _start([_settled(r, config, run_name, logs_dir) for r in colocated], config, workers)
    handles = {**dedicated, **started}
    rewards = [role.name for role in roles if role.cls is RewardModel]
    return Services(
        engine=handles["engine"].preferring(workers.rank % _num_engines(config, workers)),
        reference=handles.get("reference"),
        reward_models=tuple(handles[name] for name in rewards),
    )


def start_engines(
    config: SFTConfig, run_name: str, workers: Workers, *, logs_dir: str
) -> DeploymentHandle:
    """The engines alone, as `start_deployments` starts them."""
    role = _engine(config, num_threads=_engine_threads(config, workers))
    started = _start([_settled(role, config, run_name, logs_dir)], config, workers)
    return started["engine"].preferring(workers.rank % _num_engines(config, workers))


def _start(
    deployments: Sequence[Deployment], config: PPOConfig | SFTConfig, workers: Workers
) -> dict[str, DeploymentHandle]:
    """Each deployment beside the first workers: an engine beside as many as share it."""
    beside = workers.gather(_own_place(workers))
    handles: dict[str, DeploymentHandle] = {}
    if workers.rank == 0:
        size = config.rollout.engine.tensor_parallel
        count = _num_engines(config, workers)
        for deployment in deployments:
            if deployment.role == "engine":
                places = [_shared(beside[i * size : (i + 1) * size]) for i in range(count)]
            else:
                places = beside[:1]
            handles[deployment.role] = start_deployment(deployment, places)
    return workers.broadcast(handles)


def _shared(places: Sequence[Place]) -> Place:
    """The first of some places, with the devices of all of them: a tensor-parallel engine."""
    if len(places) == 1:
        return places[0]
    nodes = {nodes_of(place.group)[place.bundle] for place in places if place.group}
    if len(nodes) > 1:
        raise PlacementError(
            f"rollout.engine.tensor_parallel ({len(places)}): the learner workers that share an "
            f"engine lie on {len(nodes)} nodes. Set placement.strategy to PACK and "
            f"learner.num_workers so that each node holds a multiple of it, or placement.mode to "
            f"dedicated."
        )
    return replace(places[0], env=together([place.env for place in places]))


def _own_place(workers: Workers) -> Place:
    """Beside this worker: it takes nothing of the bundle, which is the worker's, and its devices.

    The two take turns.
    """
    group = ray.util.get_current_placement_group()
    if group is None:
        return Place(env=own_devices())
    # Ray Train's local rank counts by address, which nodes of one machine share.
    nodes = workers.gather(ray.get_runtime_context().get_node_id())
    number = nodes[: workers.rank].count(nodes[workers.rank])
    return Place(group, own_bundle(group, number=number), env=own_devices())


def _num_engines(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.rollout.engine.resolved_count(
        num_workers=workers.count, use_gpu=torch.cuda.is_available()
    )


def _engine_threads(config: PPOConfig | SFTConfig, workers: Workers) -> int:
    return config.learner.cpus_per_worker * workers.count // _num_engines(config, workers)


def _roles(config: PPOConfig, *, engine_threads: int, frozen_threads: int) -> list[_Role]:
    """All that a run needs besides its learner."""
    roles = [_engine(config, num_threads=engine_threads)]
    roles += [_reference(config, frozen_threads)] if config.reference else []
    num_models = len(config.model.reward or ())
    return roles + [_reward_model(config, number, frozen_threads) for number in range(num_models)]


@dataclass(frozen=True)
class _Role:
    """A deployment without what all of a run have in common."""

    name: str
    cls: type
    kwargs: dict[str, Any]
    num_threads: int


def _settled(
    role: _Role, config: PPOConfig | SFTConfig, run_name: str, logs_dir: str
) -> Deployment:
    # An actor that reserves no CPU gets one thread from Ray; it takes turns with its worker.
    threads = min(role.num_threads, os.cpu_count() or role.num_threads)
    return Deployment(
        name=f"raypo:{run_name}:{role.name}",
        cls=role.cls,
        kwargs={**role.kwargs, "num_threads": role.num_threads},
        env={"OMP_NUM_THREADS": str(threads)},
        logs_dir=logs_dir,
        **config.placement.deployment.model_dump(),
    )


def _engine(config: PPOConfig | SFTConfig, *, num_threads: int) -> _Role:
    lora = config.model.lora
    holds_adapter = isinstance(lora, PolicyLoraSection) and lora.push == "adapter"
    kwargs = {
        "model": config.model.policy,
        "section": config.rollout.engine,
        "dtype": config.model.dtype,
        "max_model_len": config.data.max_prompt_tokens + config.rollout.max_new_tokens,
        "seed": config.seed,
        "lora": lora if holds_adapter else None,
    }
    return _Role("engine", Engine, kwargs, num_threads)


def _reference(config: PPOConfig, num_threads: int) -> _Role:
    kwargs = {
        "model": config.reference,
        "dtype": config.model.dtype,
        "temperature": config.rollout.temperature,
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
    }
    return _Role("reference", ReferenceModel, kwargs, num_threads)


def _reward_model(config: PPOConfig, number: int, num_threads: int) -> _Role:
    assert config.model.reward is not None
    kwargs = {
        "model": config.model.reward[number].path,
        "policy": config.model.policy,
        "dtype": config.model.dtype,
        "max_batch_tokens": config.learner.max_tokens_per_microbatch,
    }
    return _Role(f"reward_{number}", RewardModel, kwargs, num_threads)
