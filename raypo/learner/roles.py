"""Assignment of policy and critic to workers: all workers train both, or separate teams do.

B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from raypo.collectives import Workers
from raypo.data.padding import pad_right
from raypo.models.sequence_parallel import SequenceGroup
from raypo.types import Experience


@dataclass(frozen=True)
class DataParallel:
    """Team of workers in DeepSpeed's `mpu` interface, without model parallelism."""

    group: Any
    """Process group of the team, on the default backend, for gradients and weights."""
    alone: Any
    """Process group that contains only this worker. It serves as the model-parallel group."""

    @classmethod
    def of(cls, teams: tuple[range, ...], rank: int) -> DataParallel:
        """Create the process groups; all workers of the default group call it together."""
        groups = [dist.new_group(list(team)) for team in teams]
        alone = [dist.new_group([member]) for team in teams for member in team]
        own = next(number for number, team in enumerate(teams) if rank in team)
        return cls(groups[own], alone[rank])

    def get_data_parallel_group(self) -> Any:
        """Return the data-parallel group."""
        return self.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the data-parallel group."""
        return dist.get_process_group_ranks(self.group)

    def get_data_parallel_world_size(self) -> int:
        """Return the data-parallel world size."""
        return dist.get_world_size(self.group)

    def get_data_parallel_rank(self) -> int:
        """Return this worker's rank in the data-parallel group."""
        return dist.get_rank(self.group)

    def get_model_parallel_group(self) -> Any:
        """Return the model-parallel group."""
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        """Return the model-parallel world size, 1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return the model-parallel rank, 0."""
        return 0


@dataclass(frozen=True)
class Roles:
    """Roles of the workers, as seen by one of them.

    With separate teams, the rows of a step are sharded twice: over the policy's workers and over
    the critic's workers. Sums over workers are then sums over a worker's own team.
    """

    everyone: Workers
    own: Workers
    """Workers that train the same models as this one."""
    teams: tuple[range, ...]
    """Ranks of each team: all workers, or the policy's workers and the critic's."""
    mpu: DataParallel | None = None
    """Data-parallel group for DeepSpeed, or None if the team is all workers."""
    sequence: SequenceGroup | None = None
    """Workers that share the tokens of this worker's rows, or None if it computes them alone."""
    of_rows: Workers | None = None
    """Workers among whom the rows of a step are dealt: one of each sequence group of the team. None
    without sequence groups."""

    @classmethod
    def shared(cls, workers: Workers, sequence_parallel: int = 1) -> Roles:
        """Let all workers train both models; they call it together. See `of`."""
        teams = (range(workers.count),)
        return cls(workers, workers, teams)._in_sequence_groups(sequence_parallel)

    @classmethod
    def of(cls, workers: Workers, critic_workers: int, sequence_parallel: int = 1) -> Roles:
        """Let the last `critic_workers` workers train the critic; all workers call it together.

        Args:
            workers: All learner workers.
            critic_workers: `learner.critic_workers`. 0 means that all workers train both models.
            sequence_parallel: `learner.sequence_parallel`.

        Raises:
            ValueError: no worker is left for the policy, or workers are left over that are no whole
                sequence group.
        """
        if not critic_workers:
            return cls.shared(workers, sequence_parallel)
        first = workers.count - critic_workers
        if first < 1:
            raise ValueError(
                f"learner.critic_workers ({critic_workers}): the group has {workers.count} "
                "workers, but the policy needs one of them. Start it with learner.num_workers + "
                "learner.critic_workers workers."
            )
        teams = (range(first), range(first, workers.count))
        own = workers.team([len(team) for team in teams])
        roles = cls(workers, own, teams, DataParallel.of(teams, workers.rank))
        return roles._in_sequence_groups(sequence_parallel)

    def _in_sequence_groups(self, size: int) -> Roles:
        if size == 1:
            return self
        if any(len(team) % size for team in self.teams):
            raise ValueError(
                f"learner.sequence_parallel ({size}): must divide the number of workers of each "
                f"team, but these are {[len(team) for team in self.teams]}. Set it to 1, or start "
                "with other numbers of workers."
            )
        rank = self.everyone.rank
        sequence = SequenceGroup.of(self.teams, rank, size)
        of_rows = self.everyone.among(
            [team[place::size] for team in self.teams for place in range(size)]
        )
        return replace(self, sequence=sequence, of_rows=of_rows)

    @property
    def data(self) -> Workers:
        """Workers that together hold each row of a step once, for sums over rows."""
        return self.own if self.of_rows is None else self.of_rows

    @property
    def sequence_parallel(self) -> int:
        """Number of workers that hold the same rows."""
        return 1 if self.sequence is None else self.sequence.count

    @property
    def writes_samples(self) -> bool:
        """True on workers that train the policy and together hold each row of a step once."""
        return self.trains_policy and (self.sequence is None or self.sequence.rank == 0)

    @property
    def are_apart(self) -> bool:
        """True if policy and critic have separate workers."""
        return len(self.teams) > 1

    @property
    def trains_policy(self) -> bool:
        """True if this worker trains the policy."""
        return self.everyone.rank in self.teams[0]

    @property
    def trains_critic(self) -> bool:
        """True if this worker trains the critic, provided that the run has a critic."""
        return self.everyone.rank in self.teams[-1]

    def joined(self, experience: Experience, computed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Exchange fields between the teams, for this worker's rows. All workers call it together.

        Args:
            experience: This worker's rows.
            computed: Fields of an Experience that this worker has computed, [B, T] or [B].

        Returns:
            The fields of both teams.
        """
        if not self.are_apart:
            return dict(computed)
        names = list(_names(experience))
        dims = {field: value.dim() for field, value in computed.items()}
        of_workers = self.everyone.gather((names, dims))
        lengths = experience.attention_mask.sum(1).tolist()
        own = {name: row for row, name in enumerate(names)}
        parcels: list[dict[Any, dict[str, np.ndarray]]] = []
        for rank, (theirs, _) in enumerate(of_workers):
            is_mate = any(rank in team and self.everyone.rank in team for team in self.teams)
            rows = [] if is_mate else [(name, own[name]) for name in theirs if name in own]
            parcels.append({name: _row(computed, row, lengths[row]) for name, row in rows})
        received: dict[Any, dict[str, np.ndarray]] = {}
        for parcel in self.everyone.exchange(parcels):
            received |= parcel
        joined = dict(computed)
        for field, dim in {f: dim for _, fields in of_workers for f, dim in fields.items()}.items():
            if field not in computed:
                values = [np.atleast_1d(received[name][field]) for name in names]
                padded = pad_right(values, torch.float32)
                joined[field] = padded if dim == 2 else padded.flatten()
        return joined


def _names(experience: Experience) -> Iterator[tuple[int, ...]]:
    """Return the id (group, sample, row) of each row. It identifies the row on all workers."""
    zeros = torch.zeros_like(experience.group_index)
    parts = (experience.group_index, experience.sample_index, experience.row_index)
    columns = [zeros if part is None else part for part in parts]
    return zip(*(column.tolist() for column in columns), strict=True)


def _row(computed: Mapping[str, Tensor], row: int, length: int) -> dict[str, np.ndarray]:
    """Return the fields of one row without padding."""
    return {
        field: value[row, :length].numpy() if value.dim() == 2 else value[row].numpy()
        for field, value in computed.items()
    }
