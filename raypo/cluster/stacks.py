"""The stacks of all processes of a run, and the end of some of them, on whichever node they are.

A task on each node calls py-spy (a dependency of Ray), which also reads processes that are stopped
or blocked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypo.custom.in_subprocess import descendants, kill
from raypo.ray_internals import ActorProcess

T = TypeVar("T")
PY_SPY_TIMEOUT_S = 20.0
NODE_TIMEOUT_S = 180.0
"""Seconds that a node may take to start a task and to run it. py-spy may need its time limit for
each of a node's processes, of which four are read at a time."""


def stacks_of(actors: Iterable[ActorProcess]) -> dict[str, str]:
    """Return the stacks of actors, of their descendants, and of this process, by a file's name."""
    by_node = _on_nodes(_stacks_here, actors)
    driver = {f"driver_{os.getpid()}.txt": _stack_of(psutil.Process())}
    return driver | {name: text for stacks in by_node for name, text in stacks.items()}


def kill_processes(actors: Iterable[ActorProcess]) -> None:
    """Send SIGKILL to actors and their descendants, even if some of them hang or are stopped."""
    _on_nodes(_kill_here, actors)


def _on_nodes(
    function: Callable[[Mapping[int, str]], T], actors: Iterable[ActorProcess]
) -> Sequence[T]:
    """Call a function with the processes of each node, on that node.

    Args:
        function: Function of the actors' names by process id.
        actors: The actors.

    Returns:
        The results of the nodes that answered in time.
    """
    by_node: dict[str, dict[int, str]] = {}
    for actor in actors:
        by_node.setdefault(actor.node_id, {})[actor.pid] = actor.name
    task: Any = ray.remote(num_cpus=0, max_retries=0)(function)
    calls = [
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(processes)
        for node_id, processes in by_node.items()
    ]
    results: list[T] = []
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=NODE_TIMEOUT_S)
    for call in ready:
        try:
            results.append(ray.get(call, timeout=0.0))
        except (RayError, GetTimeoutError):  # the node is gone
            continue
    return results


def _stacks_here(names: Mapping[int, str]) -> dict[str, str]:
    processes: dict[int, tuple[str, psutil.Process]] = {}
    for pid, name in names.items():
        for process_id in (pid, *descendants(pid)):
            if psutil.pid_exists(process_id) and process_id not in processes:
                title = name if process_id == pid else f"{name}_child"
                processes[process_id] = (f"{title}_{process_id}", psutil.Process(process_id))
    with ThreadPoolExecutor(4) as threads:
        texts = threads.map(_stack_of, [process for _, process in processes.values()])
        titles = [re.sub(r"[^\w.-]+", "_", title) for title, _ in processes.values()]
        return {f"{title}.txt": text for title, text in zip(titles, texts, strict=True)}


def _stack_of(process: psutil.Process) -> str:
    """Return a process's command, state and stacks, or the reason why they cannot be read."""
    try:
        state = process.status()
        text = f"{' '.join(process.cmdline())[:500]}\nstate: {state}\n\n"
    except psutil.Error as error:
        return f"it has ended: {error}\n"
    py_spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    command = [py_spy, "dump", "--pid", str(process.pid)]
    if state == psutil.STATUS_STOPPED:
        command.append("--nonblocking")  # py-spy cannot stop it once more
    try:
        dump = subprocess.run(
            command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{text}py-spy: {error}\n"
    return text + (dump.stdout or f"py-spy: {dump.stderr}")


def _kill_here(names: Mapping[int, str]) -> None:
    for pid in names:
        kill(pid, *descendants(pid))
