"""Who trains what: all workers policy and critic, or each of the two workers of its own.

B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypo.collectives import Workers
from raypo.data.padding import pad_right
from raypo.types import Experience


@dataclass(frozen=True)
class DataParallel:
    """A team of workers as DeepSpeed wants to know it, which it calls an mpu; no model is split."""

    group: Any
    """The team's, of the default backend: gradients and weights go over it."""
    alone: Any
    """The group of this worker, the only one that has its part of the model."""

    @classmethod
    def of(cls, teams: tuple[range, ...], rank: int) -> DataParallel:
        """The view of a worker on its own team; all workers of the default group call it."""
        groups = [dist.new_group(list(team)) for team in teams]
        alone = [dist.new_group([each]) for team in teams for each in team]
        own = next(number for number, team in enumerate(teams) if rank in team)
        return cls(groups[own], alone[rank])

    def get_data_parallel_group(self) -> Any:
        """Who has the same model."""
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their ranks among all workers."""
        return dist.get_process_group_ranks(self.group)

    def get_data_parallel_world_size(self) -> int:
        """How many they are."""
        return dist.get_world_size(self.group)

    def get_data_parallel_rank(self) -> int:
        """This worker's rank among them."""
        return dist.get_rank(self.group)

    def get_model_parallel_group(self) -> Any:
        """Who has parts of the same copy."""
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        """One: the copy is whole."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """The rank of the only part: 0."""
        return 0


@dataclass(frozen=True)
class Roles:
    """One worker's view of who trains policy and critic.

    Where they are apart, every row of a step is dealt once to the policy's workers and once to the
    critic's; what a step sums over workers it sums over one's own team.
    """

    everyone: Workers
    own: Workers
    """Those that train what this worker trains."""
    teams: tuple[range, ...]
    """Their ranks: of all workers, or of the policy's and of the critic's."""
    mpu: DataParallel | None = None
    """For DeepSpeed, where a team is not all workers."""

    @classmethod
    def shared(cls, workers: Workers) -> Roles:
        """All workers train both."""
        return cls(workers, workers, (range(workers.count),))

    @classmethod
    def of(cls, workers: Workers, critic_workers: int) -> Roles:
        """The last workers train the critic, so many of them; all workers call it.

        Args:
            critic_workers: `learner.critic_workers`; 0: all train both.

        Raises:
            ValueError: none would be left for the policy.
        """
        if not critic_workers:
            return cls.shared(workers)
        first = workers.count - critic_workers
        if first < 1:
            raise ValueError(
                f"learner.critic_workers ({critic_workers}): the group has {workers.count} "
                f"workers, and the policy needs one of them. Start it with learner.num_workers + "
                f"learner.critic_workers workers."
            )
        teams = (range(first), range(first, workers.count))
        own = workers.team([len(team) for team in teams])
        return cls(workers, own, teams, DataParallel.of(teams, workers.rank))

    @property
    def are_apart(self) -> bool:
        """Whether policy and critic have workers of their own."""
        return len(self.teams) > 1

    @property
    def trains_policy(self) -> bool:
        """Whether this worker does."""
        return self.everyone.rank in self.teams[0]

    @property
    def trains_critic(self) -> bool:
        """Whether this worker does, if there is a critic."""
        return self.everyone.rank in self.teams[-1]

    def joined(self, experience: Experience, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the teams found about the same rows, for this worker's rows; all call it together.

        Args:
            experience: This worker's share.
            found: Fields of an Experience that its team has evaluated, [B, T] or [B].
        """
        if not self.are_apart:
            return dict(found)
        names = list(_names(experience))
        dims = {field: value.dim() for field, value in found.items()}
        known = self.everyone.gather((names, dims))
        lengths = experience.attention_mask.sum(1).tolist()
        own = {name: row for row, name in enumerate(names)}
        parcels: list[dict[Any, dict[str, np.ndarray]]] = []
        for rank, (theirs, _) in enumerate(known):
            is_mate = any(rank in team and self.everyone.rank in team for team in self.teams)
            rows = [] if is_mate else [(name, own[name]) for name in theirs if name in own]
            parcels.append({name: _row(found, row, lengths[row]) for name, row in rows})
        told: dict[Any, dict[str, np.ndarray]] = {}
        for parcel in self.everyone.exchange(parcels):
            told |= parcel
        joined = dict(found)
        for field, dim in {f: dim for _, fields in known for f, dim in fields.items()}.items():
            if field not in found:
                values = [np.atleast_1d(told[name][field]) for name in names]
                padded = pad_right(values, torch.float32)
                joined[field] = padded if dim == 2 else padded.flatten()
        return joined


def _names(experience: Experience) -> Iterator[tuple[int, ...]]:
    """The name of each row, the same on all workers: its draw, its sample and its row."""
    zeros = torch.zeros_like(experience.group_index)
    parts = (experience.group_index, experience.sample_index, experience.row_index)
    columns = [zeros if part is None else part for part in parts]
    return zip(*(column.tolist() for column in columns), strict=True)


def _row(found: Mapping[str, Tensor], row: int, length: int) -> dict[str, np.ndarray]:
    """What was found about one row, without its padding."""
    return {
        field: value[row, :length].numpy() if value.dim() == 2 else value[row].numpy()
        for field, value in found.items()
    }
