"""Log-probs of preferences under the reference model: computed once, cached in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from raypo.collectives import Workers
from raypo.data.item_store import ItemStore
from raypo.learner.preference_tasks import PreferenceTask, VerdictTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.networks import Policy
from raypo.storage.parquet import from_parquet, to_parquet
from raypo.storage.run_files import RunFiles
from raypo.types import Pair, Verdict

REFERENCE = "reference.parquet"
"""Name of the cache file. It holds two log-probs for each preference, and a digest of the
preferences and the reference."""
Preference = TypeVar("Preference", Pair, Verdict)


def with_references(
    items: Sequence[Preference],
    learner: SupervisedLearner[Preference],
    *,
    other: Any = None,
    name: str,
    files: RunFiles,
    workers: Workers,
) -> Sequence[Preference]:
    """Return the preferences with `ref_log_probs`, from the cache or computed now.

    All workers call this before the learner is restored and before its first update.

    Args:
        items: The preferences, the same on all workers.
        learner: Learner that holds the policy, and the task that computes log-probs.
        other: Causal language model to use as the reference. None means the learner's model with
            its adapter off.
        name: Identity of the reference. Cached values of another reference are not used.
        files: The run's folder, which holds the cache.
        workers: All workers; each computes a share.
    """
    digest = _digest(items, name)
    known = workers.broadcast(_read(files, digest) if workers.rank == 0 else None)
    if known is None:
        known = _asked(items, learner, other, workers)
        if workers.rank == 0:
            _write(files, digest, known)
    return ItemStore(
        replace(item, ref_log_probs=each) for item, each in zip(items, known, strict=True)
    )


def _asked(
    items: Sequence[Preference],
    learner: SupervisedLearner[Preference],
    other: Any,
    workers: Workers,
) -> list[tuple[float, float]]:
    """Compute the reference's log-probs of all items; each worker computes its share."""
    task: Any = learner.task
    assert isinstance(task, PreferenceTask | VerdictTask)
    reference = None if other is None else Policy(other, temperature=1.0)

    def ask(model: Any, some: Sequence[Preference], device: torch.device) -> list[Any]:
        asked = model if reference is None else reference.to(device)
        return task.log_probs(asked, some, device)  # type: ignore[arg-type]

    own = items[workers.rank :: workers.count]
    shares = workers.gather(learner.without_adapter(own, ask))
    return [shares[place % workers.count][place // workers.count] for place in range(len(items))]


def _digest(items: Sequence[Pair | Verdict], name: str) -> str:
    """Return a digest of these preferences, in this order, and of the reference's name."""
    digest = hashlib.sha256(name.encode())
    for item in items:
        for value in vars(item).values():
            if isinstance(value, np.ndarray):
                digest.update(len(value).to_bytes(8, "little") + value.tobytes())
    return digest.hexdigest()


def _read(files: RunFiles, digest: str) -> list[tuple[float, float]] | None:
    content = files.read(REFERENCE)
    table = None if content is None else from_parquet(content)
    if table is None or (table.schema.metadata or {}).get(b"preferences") != digest.encode():
        return None
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _write(files: RunFiles, digest: str, known: Sequence[tuple[float, float]]) -> None:
    import pyarrow as pa

    first, second = zip(*known, strict=True)
    table = pa.table({"first": first, "second": second})
    files.write(REFERENCE, to_parquet(table.replace_schema_metadata({"preferences": digest})))
