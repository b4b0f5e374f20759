"""Checks of a run's inputs: those of `raypo train` and `raypo plan`, and a trial call of the reward
functions."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from raypo.checks.input_checks import check_disk, check_inputs
from raypo.checks.model_checks import check_kernels, check_models
from raypo.checks.resume_checks import check_run_folder, is_finished
from raypo.checks.row_checks import check_prompt_lengths, with_steps_of_epochs
from raypo.cluster.hardware import GB, Node
from raypo.cluster.placement import takes_gpus
from raypo.config import AnyConfig, ConfigError, OnlineConfig, PolicyExamplesConfig, functions_of
from raypo.custom.in_subprocess import CallTooSlowError, call_in_subprocess
from raypo.doctor.result import PROCESS_LIMIT_S, Check, Result, fault, ok, skipped, warning
from raypo.plan.fit import make_plan
from raypo.storage.run_files import RunFiles

SLOW_MS = 1000.0
"""Milliseconds for a response above which a reward function counts as slow."""


def input_checks(
    config: AnyConfig, nodes: Callable[[], Sequence[Node]], *, is_here: bool
) -> list[Check]:
    """Return the checks that `raypo train` and `raypo plan` run before models load.

    Args:
        config: The whole run config.
        nodes: Function that returns the nodes of the run, or none if they are unknown. The checks
            call it within their limits.
        is_here: True if the run would start a local Ray on this machine.
    """
    return [
        Check("inputs", partial(_inputs, config, is_here=is_here), PROCESS_LIMIT_S),
        Check("models", partial(_models_apart, config, nodes), PROCESS_LIMIT_S + 5.0),
        Check("fit", partial(_fit, config, nodes), PROCESS_LIMIT_S),
        Check("run folder", partial(_run_folder, config), PROCESS_LIMIT_S),
    ]


def _inputs(config: AnyConfig, *, is_here: bool) -> Result:
    notes = check_inputs(config, on_this_machine=is_here)
    if isinstance(config, OnlineConfig):
        notes += check_prompt_lengths(config)
    with_steps_of_epochs(config)
    files = "config, files, rows and functions"
    if notes:
        return warning(
            f"{files} are usable. {'; '.join(notes)}", "These settings are rarely intended."
        )
    return ok(files)


def _models_apart(config: AnyConfig, nodes: Callable[[], Sequence[Node]]) -> Result:
    resources = [node.resources for node in nodes()]
    what = "reading the models' configs and tokenizers"
    return call_in_subprocess(_models, config, resources, limit_s=PROCESS_LIMIT_S, what=what)


def _models(config: AnyConfig, resources: Sequence[dict[str, float]]) -> Result:
    check_models(config)
    if resources and not takes_gpus(config, resources):
        check_kernels(config)
    return ok("configs, weights, tokenizers and chat templates")


def _fit(config: AnyConfig, nodes: Callable[[], Sequence[Node]]) -> Result:
    known = nodes()
    if not known:
        return skipped("the run uses a cluster: add --cluster to check its nodes")
    plan = make_plan(config, known)
    if plan.problems:
        meaning = "The run would run out of memory, or wait for devices that do not exist."
        return fault(" ".join(plan.problems), meaning, "Run `raypo plan` for the full table.")
    loads = [load for load in plan.loads if load.available]
    worst = max(loads, key=lambda load: load.needed / (load.available or 1), default=None)
    observed = "the nodes' memory is unknown"
    if worst is not None:
        observed = f"{worst.name}: {worst.needed / GB:.3g} of {(worst.available or 0) / GB:.3g} GB"
    return ok("; ".join([observed, *plan.notes]))


def checkpoint_bytes(config: AnyConfig, nodes: Sequence[Node]) -> int:
    """Return the predicted size of a run's checkpoints, including the one being written."""
    try:
        plan = make_plan(config, nodes)
    except ConfigError:  # reported by the check of the fit
        return 0
    snapshots = sum(load.snapshot for load in plan.loads if not load.is_gpu)
    return snapshots * (config.checkpoint.keep + 1)


def _run_folder(config: AnyConfig) -> Result:
    files = RunFiles(config.storage_path, config.name)
    run = with_steps_of_epochs(config)
    check_run_folder(run, files)
    if is_finished(files, run):
        return ok(f"{files.location} holds this run, which is finished")
    check_disk(run)
    if not files.exists():
        return ok(f"{files.location} is new")
    files.check_writable()
    done = files.last_step()
    observed = f"the run would resume after step {done}" if done else "no step yet"
    return ok(f"{files.location}: {observed}")


def reward_check(
    config: AnyConfig, path: Path, overrides: Sequence[str], *, limit_s: float = PROCESS_LIMIT_S
) -> list[Check]:
    """Return the trial call of the reward functions on three rows, if the config names any.

    Args:
        config: Config of the run.
        path: File of the config.
        overrides: Overrides of the command line.
        limit_s: Time limit in seconds.
    """
    if not isinstance(config, OnlineConfig | PolicyExamplesConfig):
        return []
    functions: list[str | None] = []  # those that `raypo try-reward` would call
    if isinstance(config, OnlineConfig) and not config.rollout.is_episodic:
        functions += [config.reward.function, *functions_of(config.data.prompts).values()]
    if config.eval.prompts:
        functions += [config.eval.function, *functions_of(config.eval.prompts).values()]
    if not any(functions):
        return []
    may_fail = isinstance(config, OnlineConfig) and config.reward.max_failed_fraction > 0.0
    function = partial(_try_reward, path, overrides, limit_s, may_fail=may_fail)
    return [Check("reward function", function, limit_s + 5.0)]


def _try_reward(path: Path, overrides: Sequence[str], limit_s: float, *, may_fail: bool) -> Result:
    """Run `raypo try-reward`, whose processes are killed at the limit."""
    command = [sys.executable, "-m", "raypo.cli", "try-reward", str(path), *overrides]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files and not pipes: processes that the user's code leaves behind would keep a pipe open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise CallTooSlowError("reward function") from None
        finally:
            with suppress(ProcessLookupError):  # none is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        lines = [line for file in (out, err) for line in _lines(file)]
    remedy = f"`raypo try-reward {path}` shows each response and its score."
    if status:
        said = [line.removeprefix("raypo: ") for line in lines if line.startswith("raypo: ")]
        why = " ".join(said) or f"it ended with status {status}"
        if not said and status > 0 and lines:  # not by a signal: the last line tells the cause
            why = lines[-1]
        return fault(why, "The run would fail when it scores its first responses.", remedy)
    if unscored := [line.strip() for line in lines if "  no score" in line]:
        observed = f"{len(unscored)} made-up responses have no score, like: {unscored[0]}"
        if may_fail:
            meaning = (
                "Such samples are dropped; more than reward.max_failed_fraction of them end the "
                "run."
            )
            return warning(observed, meaning, remedy)
        meaning = "Such a sample ends a run, because reward.max_failed_fraction is 0."
        return fault(observed, meaning, f"{remedy} Score it, or raise reward.max_failed_fraction.")
    text = "\n".join(lines)
    notes = re.findall(r"^  Note: (.*)", text, re.MULTILINE)
    # Equal scores are no fault if the function judges, say, length.
    if notes and len(set(re.findall(r"  score (\S+)", text))) == 1:
        observed = f"right, empty and wrong responses have the same score: {notes[0]}"
        return warning(observed, "The run may learn nothing.", remedy)
    calls = re.findall(r"\S+: \S+ s for a call with \d+ responses, (\S+) ms each", text)
    slowest_ms = max(map(float, calls), default=0.0)
    if slowest_ms > SLOW_MS:
        meaning = "A step has far more responses, and waits for all their scores."
        remedy = "Make the function faster, or raise reward.processes to call it in parallel."
        return warning(f"{slowest_ms / 1000:.3g} s for each response", meaning, remedy)
    return ok("; ".join([f"at most {slowest_ms:.3g} ms for each response", *notes]))


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().splitlines()
