"""A run small enough for tests: a random tiny policy is rewarded for digits."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from raypo import Rollout
from tests.tiny import tiny_policy

REPOSITORY = Path(__file__).parents[2]
NOT_NUMBERS = ("time/", "perf/")
"""What may differ between two runs of one seed."""


def digit_share(rollouts: list[Rollout]) -> list[float]:
    return [sum(c.isdigit() for c in r.response) / max(len(r.response), 1) for r in rollouts]


def write_task(folder: Path) -> Path:
    """A policy, prompts and a run config in `folder`; returns the config's path."""
    tiny_policy(folder / "policy")
    prompts = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]
    for name, rows in (("prompts", prompts[:24]), ("held_out", prompts[24:])):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    config = folder / "ppo.yaml"
    config.write_text(
        f"""
name: tiny
num_steps: 4
storage_path: {folder}/runs
model: {{policy: {folder}/policy}}
data: {{prompts: {folder}/prompts.jsonl, label_key: answer, max_prompt_tokens: 16}}
reward: {{function: tests.integration.task:digit_share}}
rollout: {{prompts_per_step: 8, samples_per_prompt: 4, max_new_tokens: 8}}
ppo: {{minibatch_size: 16, num_epochs: 2, kl: {{coef: 0.05}}}}
learner: {{policy_lr: 1.0e-3, critic_lr: 1.0e-3, max_tokens_per_microbatch: 128}}
eval: {{prompts: {folder}/held_out.jsonl, every: 2}}
checkpoint: {{every: 2}}
"""
    )
    return config


def raypo(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """The `raypo` command in a process group of its own, as a terminal starts it."""
    paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        [sys.executable, "-m", "raypo.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CI": "1"},
        start_new_session=True,
        **options,
    )


def on_a_cluster(what: str, given: str, *, timeout_s: float = 900.0) -> Any:
    """What `tests.integration.on_a_cluster` prints; it is a driver of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.on_a_cluster", what, given],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def own_ray() -> str:
    """Address of this process's Ray; what Ray finds by itself may be a cluster that is gone."""
    import ray

    return ray.get_runtime_context().gcs_address


def kill_train_workers() -> None:
    """SIGKILL for the learner workers of this process's own Ray, whatever else the machine runs."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "RayTrainWorker" in " ".join(process.cmdline()):
                process.kill()


def wait_for_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(read_metrics(folder)) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def kill_train_workers_after(folder: Path, num_steps: int) -> None:
    wait_for_steps(folder, num_steps)
    kill_train_workers()


def pid_of(replica: str) -> int:
    """Return the id of a replica's process, once it is up."""
    import ray
    from ray.exceptions import RayActorError

    while True:
        with suppress(RayActorError, ValueError):
            actor: Any = ray.get_actor(replica, "raypo")
            status: Any = ray.get(actor.status.remote())
            return status.pid
        time.sleep(0.2)


def kill_at_work(replica: str, folder: Path, *, last_step: int) -> int:
    """SIGKILL for the only replica of a role in the middle of a call; its process id.

    It stands still from the end of the first step on: the next call to it waits until it is killed.
    """
    wait_for_steps(folder, 1)
    pid = pid_of(replica)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(3.0)  # longer than a step without the call that waits
    assert len(read_metrics(folder)) < last_step
    os.kill(pid, signal.SIGKILL)
    return pid


def numbers(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without times, which differ from run to run."""
    return [
        {name: value for name, value in row.items() if not name.startswith(NOT_NUMBERS)}
        for row in metrics
    ]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_probe(name: str, *options: str) -> str:
    """Runs the tests of a file of this folder in another process; returns pytest's output."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", f"tests/integration/{name}"),
            *("-m", "", "-q", "-p", "no:xdist", *options),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout
