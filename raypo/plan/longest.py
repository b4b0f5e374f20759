"""The longest response with which a run fits, and the keys that make it longer."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from raypo.cluster.hardware import Node
from raypo.config import AnyConfig, ConfigError, OnlineConfig
from raypo.config.sweep_config import with_values
from raypo.models.model_shape import Models
from raypo.plan.fit import OFF_LOAD, TILE, can_share_rows, can_tile, make_plan

LENGTHS = sorted(int(1024 * 2**octave * part) for octave in range(11) for part in (1, 1.5))
"""Lengths that are tried, in tokens: two for each doubling."""
WORTH = 1.3
"""A change is named if the longest response grows by this factor."""
MAX_CHANGES = 3


def longest_response(
    config: AnyConfig, nodes: Sequence[Node], changes: Mapping[str, Any] | None = None
) -> int:
    """Return the most tokens of a response with which a run fits, of `LENGTHS`; 0 if none does.

    The positions of the model are not regarded. The budget of a pass grows with the row.

    Args:
        config: The config.
        nodes: The hardware.
        changes: New values, by dotted config key.
    """
    changes = changes or {}
    return (0, *LENGTHS)[bisect(LENGTHS, False, key=lambda n: not _fits(config, nodes, changes, n))]


def longer_with(config: AnyConfig, nodes: Sequence[Node]) -> list[tuple[dict[str, Any], int]]:
    """Return changes that make the longest response longer, and its tokens; the best first."""
    now = longest_response(config, nodes)
    lengths = [(change, longest_response(config, nodes, change)) for change in _changes(config)]
    longer = [(change, tokens) for change, tokens in lengths if tokens >= WORTH * max(now, 1)]
    return sorted(longer, key=lambda pair: -pair[1])[:MAX_CHANGES]


def _fits(
    config: AnyConfig, nodes: Sequence[Node], changes: Mapping[str, Any], tokens: int
) -> bool:
    key = "rollout.max_new_tokens"
    if not isinstance(config, OnlineConfig):
        key = "data.max_response_tokens"
    values = {key: tokens, **changes}
    learner, budget = config.learner, config.learner.max_tokens_per_microbatch
    if budget != "auto":
        shares = changes.get("learner.sequence_parallel", learner.sequence_parallel)
        row = -(-(config.data.max_prompt_tokens + tokens) // shares)
        values["learner.max_tokens_per_microbatch"] = max(row, budget)
    try:
        return make_plan(config.parse(with_values(config.model_dump(), values)), nodes).fits
    except ConfigError:
        return False


def _changes(config: AnyConfig) -> Iterator[dict[str, Any]]:
    learner = config.learner
    kinds: list[Any] = [False, True, "offload"]
    for kind in kinds[kinds.index(learner.activation_checkpointing) + 1 :]:
        yield {"learner.activation_checkpointing": kind}
    models = Models.read(config)
    if learner.mlp_tile_tokens is None and can_tile(models):
        yield {"learner.mlp_tile_tokens": TILE}
    yield from ({"learner.zero_stage": stage} for stage in range(learner.zero_stage + 1, 4))
    yield {"learner.deepspeed": OmegaConf.to_object(OmegaConf.merge(learner.deepspeed, OFF_LOAD))}
    for size in (2, 4, 8) if can_share_rows(config, models) else ():
        if size > learner.sequence_parallel and learner.num_workers % size == 0:
            yield {"learner.sequence_parallel": size}
