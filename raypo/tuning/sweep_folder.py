"""The folder of a sweep: whose it is, and whether anything is left to do. Imports nothing heavy."""

from __future__ import annotations

from typing import Any

from raypo.config import NUMBERS_DO_NOT_DEPEND_ON, AnyConfig, ConfigError, parse_run_config
from raypo.config.base import RECORDED_BASE
from raypo.config.sweep_config import SweepConfig
from raypo.storage.run_files import RunFiles

TRIALS_FOLDER = "trials"
"""Below a sweep's folder: the run folders of its trials."""
TRIALS_DO_NOT_DEPEND_ON = ("max_concurrent", "num_samples", "resources", "storage_path")
"""Keys of a sweep file that may change when it is resumed, or given more trials."""


def recorded_config(sweep: SweepConfig, base: AnyConfig) -> dict[str, Any]:
    """What the folder's config.yaml holds."""
    values = sweep.model_dump(mode="json", exclude_unset=True)
    return {"name": sweep.name, **values, RECORDED_BASE: base.model_dump(mode="json")}


def check_sweep_folder(sweep: SweepConfig, base: AnyConfig, files: RunFiles) -> None:
    """Refuse to go on in a folder that belongs to another sweep.

    Raises:
        ConfigError: with every key that differs.
    """
    recorded = files.config()
    if recorded is None:
        return
    earlier_base = recorded.pop(RECORDED_BASE, None)
    if earlier_base is None:
        raise ConfigError(
            f"name ({sweep.name}): {files.location} holds a run, no sweep. Choose another name or "
            f"storage_path."
        )
    origin = f"{files.location}/config.yaml"
    earlier = SweepConfig.parse(recorded, origin=origin)
    changes = earlier.differences(sweep, ignore=TRIALS_DO_NOT_DEPEND_ON)
    changes += [
        f"{sweep.base}, {change}"
        for change in parse_run_config(earlier_base, origin=origin).differences(
            base, ignore=("name", *NUMBERS_DO_NOT_DEPEND_ON)
        )
    ]
    if changes:
        lines = "\n  ".join(changes)
        raise ConfigError(
            f"name ({sweep.name}): {files.location} holds another sweep:\n  {lines}\n"
            f"Change these keys back to go on, choose another name, or start over with --fresh."
        )


def is_done(sweep: SweepConfig, files: RunFiles) -> bool:
    """Whether the folder holds this sweep with as many trials, all ended and none failed."""
    summary = files.summary()
    return (
        summary is not None
        and summary["status"] == "finished"
        and summary["num_trials"] >= sweep.num_trials
        and not summary["trials"]["failed"]
    )
