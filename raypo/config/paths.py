"""Relative paths of a run file mean the driver's folder, wherever the reader runs."""

from __future__ import annotations

from pathlib import Path

from raypo.config.run import PPOConfig


def absolute_paths(config: PPOConfig, base: Path) -> PPOConfig:
    """The config with every path that exists below `base` made absolute; hub ids stay."""
    model = config.model.model_copy(
        update={
            key: _absolute(getattr(config.model, key), base)
            for key in ("policy", "critic", "reference")
        }
    )
    data = config.data.model_copy(
        update={"prompts": tuple(_absolute(path, base) for path in config.data.prompts)}
    )
    held_out = config.eval.prompts
    evaluation = config.eval.model_copy(
        update={
            "prompts": held_out and tuple(_absolute(path, base) for path in held_out),
            "function": _absolute_function(config.eval.function, base),
        }
    )
    reward = config.reward.model_copy(
        update={"function": _absolute_function(config.reward.function, base)}
    )
    return config.model_copy(
        update={"model": model, "data": data, "eval": evaluation, "reward": reward}
    )


def storage_path(config: PPOConfig) -> str:
    """Where runs are kept: a URI as it is, a local path made absolute."""
    path = config.storage_path
    return path if is_uri(path) else str(Path(path).expanduser().absolute())


def is_uri(path: str) -> bool:
    """Whether a storage path is a URI (s3://bucket/folder) and no local path."""
    return "://" in path


def _absolute(path: str | None, base: Path) -> str | None:
    if path is None or is_uri(path):
        return path
    full = base / Path(path).expanduser()
    return str(full) if full.exists() else path


def _absolute_function(spec: str | None, base: Path) -> str | None:
    """`file.py:name` with the file's full path; `package.module:name` stays."""
    if spec is None or ":" not in spec:
        return spec
    file, name = spec.rsplit(":", 1)
    return f"{_absolute(file, base)}:{name}" if file.endswith(".py") else spec
