"""The bundles of the dedicated group: which engine or frozen model lies in which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raypo.config import FrozenSection, PPOConfig, SFTConfig

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Guest:
    """One replica in a bundle."""

    role: str
    """engine, reference, reward_0, reward_1, ..."""
    index: int
    gpus: float
    """What it takes of the bundle's GPUs."""

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"


@dataclass
class DedicatedBundle:
    """Resources that are reserved together, on one node, and who shares them."""

    cpus: int
    gpus: int
    guests: list[Guest]

    @property
    def resources(self) -> dict[str, float]:
        """As Ray counts them."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def has_room_for(self, guest: Guest) -> bool:
        """Whether the guest's share of a GPU is left; on CPU all share the cores."""
        taken = sum(each.gpus for each in self.guests)
        return taken + guest.gpus <= self.gpus + _ROUNDING

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU" if self.gpus else ""
        return f"{self.cpus} CPU{gpus} for {', '.join(map(str, self.guests))}"


def dedicated_bundles(config: PPOConfig | SFTConfig, *, use_gpu: bool) -> list[DedicatedBundle]:
    """The dedicated group's bundles, engines first; empty where everything is colocated."""
    bundles: list[DedicatedBundle] = []
    cpus = config.placement.cpus_per_bundle
    for guest in _guests(config, use_gpu=use_gpu):
        takes_cores = guest.role == "engine" and not use_gpu  # engines do not take turns
        shared = [each for each in bundles if not takes_cores and each.has_room_for(guest)]
        if shared:
            shared[0].guests.append(guest)
        else:
            gpus = max(1, round(guest.gpus)) if use_gpu else 0
            bundles.append(DedicatedBundle(cpus, gpus, [guest]))
    return bundles


def with_dedicated(config: PPOConfig, roles: Iterable[str]) -> PPOConfig:
    """The config with these roles in the dedicated group, and no others.

    Args:
        roles: engine, reference, reward_0, ...
    """
    wanted = {role.partition("_")[0] for role in roles}
    mode = {
        role: "dedicated" if role in wanted else "colocated"
        for role in ("engine", "reference", "reward")
    }
    placement = config.placement.model_copy(update={"mode": mode})
    return config.model_copy(update={"placement": placement})


def _guests(config: PPOConfig | SFTConfig, *, use_gpu: bool) -> list[Guest]:
    placement, engine = config.placement, config.rollout.engine
    guests = []
    if placement.group_of("engine") == "dedicated":
        count = engine.resolved_count(num_workers=config.learner.num_workers, use_gpu=use_gpu)
        share = placement.gpus.engine * engine.tensor_parallel if use_gpu else 0.0
        guests += [Guest("engine", index, share) for index in range(count)]
    if not isinstance(config, PPOConfig):
        return guests
    frozen = placement.frozen
    if placement.group_of("reference") == "dedicated" and config.reference:
        share = placement.gpus.reference * frozen.reference.tensor_parallel if use_gpu else 0.0
        guests += [Guest("reference", index, share) for index in range(_count(frozen.reference))]
    if placement.group_of("reward") == "dedicated":
        share = placement.gpus.reward * frozen.reward.tensor_parallel if use_gpu else 0.0
        count = len(config.model.reward or ())
        guests += [
            Guest(f"reward_{number}", index, share)
            for number in range(count)
            for index in range(_count(frozen.reward))
        ]
    return guests


def _count(section: FrozenSection) -> int:
    return 1 if section.num_replicas == "auto" else section.num_replicas
