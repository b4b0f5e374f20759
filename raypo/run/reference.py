"""Log-probs of preferences under the reference model: computed once, cached in the run's folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from typing_extensions import override

from raypo.data.item_store import LazySequence
from raypo.learner.supervised import SupervisedLearner
from raypo.models.networks import Policy
from raypo.models.packed_attention import reads_packed
from raypo.run.run import Run
from raypo.storage.parquet import from_parquet, to_parquet
from raypo.storage.run_files import RunFiles
from raypo.types import Images, Pair, Verdict

REFERENCE = "reference.parquet"
"""Name of the cache file. It holds two log-probs for each preference, and a digest of the
preferences and the reference."""
Preference = TypeVar("Preference", Pair, Verdict)


def with_references(
    run: Run[Any],
    items: Sequence[Preference],
    learner: SupervisedLearner[Preference],
    *,
    model: Any,
    name: str,
) -> Sequence[Preference]:
    """Return the preferences with `ref_log_probs`, from the cache or computed now.

    All workers call this before the learner is restored and before its first update.

    Args:
        run: The run, whose folder holds the cache.
        items: The preferences, the same on all workers. Each worker computes a share.
        learner: Learner that holds the policy, and the task that computes log-probs.
        model: Causal language model to use as the reference. None means the learner's model with
            its adapter off.
        name: Identity of the reference. Cached values of another reference are not used.
    """
    workers = run.workers
    digest = _digest(items, name) if workers.rank == 0 else ""  # reads all images
    log_probs = workers.broadcast(_read(run.files, digest) if workers.rank == 0 else None)
    if log_probs is None:
        task: Any = learner.task
        reference = None if model is None else Policy(model, temperature=1.0)
        if reference is not None and reads_packed(model):
            # Workers that share rows have the same ones, and each would compute all their tokens.
            reference.sequence_group = task.module.sequence_group

        def ask(policy: Any, batch: Sequence[Preference], device: torch.device) -> list[Any]:
            evaluated = policy if reference is None else reference.to(device)
            return task.log_probs(evaluated, batch, device)

        data = learner.data
        share = items[data.rank :: data.count]
        shares = data.gather(learner.without_adapter(share, ask))
        log_probs = [shares[n % data.count][n // data.count] for n in range(len(items))]
        if workers.rank == 0:
            _write(run.files, digest, log_probs)
    return _WithReferences(items, log_probs)


class _WithReferences(LazySequence[Preference]):
    """View of preferences that adds `ref_log_probs` on access, so that images are not copied."""

    def __init__(
        self, items: Sequence[Preference], log_probs: Sequence[tuple[float, float]]
    ) -> None:
        assert len(items) == len(log_probs)
        self._items, self._log_probs = items, log_probs

    def __len__(self) -> int:
        return len(self._items)

    @override
    def item(self, index: int) -> Preference:
        return replace(self._items[index], ref_log_probs=self._log_probs[index])


def _digest(items: Sequence[Pair | Verdict], name: str) -> str:
    """Return a digest of these preferences, in this order, and of the reference's name."""
    digest = hashlib.sha256(name.encode())
    for item in items:
        for value in vars(item).values():
            if isinstance(value, np.ndarray):
                digest.update(len(value).to_bytes(8, "little") + value.tobytes())
            elif isinstance(value, Images):
                digest.update(value.digest.encode())
    return digest.hexdigest()


def _read(files: RunFiles, digest: str) -> list[tuple[float, float]] | None:
    content = files.read(REFERENCE)
    table = None if content is None else from_parquet(content)
    if table is None or (table.schema.metadata or {}).get(b"preferences") != digest.encode():
        return None
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _write(files: RunFiles, digest: str, log_probs: Sequence[tuple[float, float]]) -> None:
    import pyarrow as pa

    first, second = zip(*log_probs, strict=True)
    table = pa.table({"first": first, "second": second})
    files.write(REFERENCE, to_parquet(table.replace_schema_metadata({"preferences": digest})))
