"""A Ray cluster of several nodes on this machine; run as a program, for it is a driver of its own.

`placement FOLDER`: which bundle, node and GPUs each replica of a dedicated group was given, under
each strategy; `colocated FOLDER`: the same of replicas beside learner workers. The GPUs are
declared, not real. `ppo TASK`: a run (`Task` as JSON) whose engine, and if asked whose learner
workers, are killed on the way. `elastic FOLDER`: a run of one or two workers on two nodes, one of
which is lost, comes back, and is announced to go. `sweep FILE`: a sweep of two trials at a time,
each of which takes two of four cores on two nodes; it is interrupted and goes on. All print JSON as
their last line.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.util.placement_group import remove_placement_group

USERS_VARIABLES = {"NCCL_DEBUG": "INFO"}
TOLD = ("NCCL_DEBUG", "NCCL_CUMEM_ENABLE", "TOKENIZERS_PARALLELISM")
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


def cluster(nodes: list[dict[str, Any]]) -> Cluster:
    head, *others = nodes
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **head})
    for node in others:
        made.add_node(**node)
    return made


def placement() -> dict[str, Any]:
    from raypo.cluster.placement import PlacementError, dedicated_bundles
    from raypo.config import PlacementSection, PPOConfig
    from raypo.deployment.deployment import Deployment, start_deployment
    from raypo.deployment.reserve import nodes_of, reserve
    from raypo.run.dedicated_services import dedicated_placements
    from tests.integration.deployments import Doubler, statuses

    made = cluster([{"num_cpus": 0}, *[{"num_cpus": 4, "num_gpus": 4}] * 3])
    ray.init(address=made.address, namespace="raypo", log_to_driver=False)
    config = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p", "reward": "r"},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": 2, "tensor_parallel": 2}},
            "placement": {"mode": "dedicated"},
        }
    )
    bundles = dedicated_bundles(config, use_gpu=True)
    found: dict[str, Any] = {"bundles": list(map(str, bundles))}
    for strategy in STRATEGIES:
        try:
            wanted = PlacementSection.model_validate({"strategy": strategy, "timeout_s": 5})
            group = reserve(bundles, "the dedicated group", name=strategy, placement=wanted)
        except PlacementError as error:
            found[strategy] = str(error)
            continue
        found[strategy] = [nodes_of(group).index(node) for node in nodes_of(group)]
        if strategy == "SPREAD":
            found["replicas"] = {}
            for role, places in dedicated_placements(group, bundles).items():
                kwargs = {"folder": sys.argv[2]}
                deployment = Deployment(f"raypo:run:{role}", Doubler, kwargs)
                handle = start_deployment(deployment, places)
                handle.wait(120)
                answers = handle.call_all(Doubler.environment, "CUDA_VISIBLE_DEVICES")
                found["replicas"][role] = [
                    (place.bundle, nodes_of(group)[place.bundle] == life.node_id, answer.result())
                    for place, life, answer in zip(places, statuses(handle), answers, strict=True)
                ]
                handle.shutdown()
        remove_placement_group(group)
    return found


def colocated() -> dict[str, Any]:
    """Workers of one GPU; engines, one for two of them, and a reference on two GPUs each."""
    made = cluster([{"num_cpus": 0}, *[{"num_cpus": 4, "num_gpus": 2}] * 3])
    ray.init(address=made.address, namespace="raypo", log_to_driver=False)
    return {"PACK": beside_workers(4, "PACK"), "SPREAD": beside_workers(2, "SPREAD")}


def beside_workers(count: int, strategy: str) -> dict[str, Any] | str:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    result = TorchTrainer(
        show_places,
        train_loop_config={"strategy": strategy, "folder": sys.argv[2]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=count, use_gpu=True, placement_strategy=strategy),
        run_config=RunConfig(name=strategy, storage_path=f"{sys.argv[2]}/runs"),
    ).fit()
    assert result.return_value is not None
    return result.return_value


def show_places(task: dict[str, Any]) -> dict[str, Any] | str:
    """The train loop: starts a plain class where the models of a run would be."""
    from raypo.cluster.placement import PlacementError, served_roles
    from raypo.collectives import Workers
    from raypo.config import PPOConfig
    from raypo.deployment.deployment import Deployment, start_deployment
    from raypo.run.services import colocated_placements
    from tests.integration.deployments import Doubler, statuses

    workers = Workers.current()
    num_engines = workers.count // 2
    config = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p", "reward": "r"},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": num_engines, "tensor_parallel": 2}},
            "learner": {"num_workers": workers.count},
            "placement": {"frozen": {"reference": {"backend": "vllm", "tensor_parallel": 2}}},
        }
    )
    context = ray.get_runtime_context()
    mine = {"node": context.get_node_id(), "gpus": context.get_accelerator_ids()["GPU"]}
    found: dict[str, Any] = {"workers": workers.gather(mine)}
    nodes = [worker["node"] for worker in found["workers"]]
    try:
        roles = served_roles(config, num_workers=workers.count, use_gpu=False)
        places = colocated_placements(roles, workers, nodes)
    except PlacementError as error:
        return str(error)
    if workers.rank == 0:
        for role, of_role in places.items():
            name, kwargs = f"raypo:{task['strategy']}:{role}", {"folder": task["folder"]}
            deployment = Deployment(name, Doubler, kwargs)
            handle = start_deployment(deployment, of_role)
            handle.wait(120)
            devices = [
                answer.result()
                for answer in handle.call_all(Doubler.environment, "CUDA_VISIBLE_DEVICES")
            ]
            found[role] = [
                {"node": life.node_id, "bundle": place.bundle, "gpus": (shown or "").split(",")}
                for place, life, shown in zip(of_role, statuses(handle), devices, strict=True)
            ]
            handle.shutdown()
    workers.barrier()
    return found


@dataclass
class Task:
    """A run on a cluster, and what it loses."""

    config: str
    name: str
    overrides: dict[str, Any] = field(default_factory=dict)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    kill_workers: bool = False
    is_users_ray: bool = False
    """Whether `ray.init` was called before, with a variable of the user's."""


def ppo(task: Task) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig

    from raypo import PPOConfig, PPOTrainer
    from tests.integration.task import kill_train_workers, read_metrics, wait_for_steps

    made = cluster(task.nodes)
    folder = Path(task.config).parent / "runs" / task.name
    roles = ("engine", "reference")
    found: dict[str, Any] = {"processes": []}

    def kill() -> None:
        wait_for_steps(folder, 1)
        found["nodes"] = {role: [r.node_id for r in replicas(task.name, role)] for role in roles}
        found["environments"] = environments(task.name)
        found["namespace"] = ray.get_runtime_context().namespace
        engines = [psutil.Process(engine.pid) for engine in replicas(task.name, "engine")]
        theirs = {engine.pid: engine.children(recursive=True) for engine in engines}
        found["killed"] = kill_at_work(task.name)
        lost = theirs[found["killed"]]
        found["processes_of_lost"] = len(lost)
        found["orphans"] = len(psutil.wait_procs(lost, timeout=30)[1])
        if not task.kill_workers:
            return
        wait_for_steps(folder, 3)
        found["processes"].append({role: pids(task.name, role) for role in roles})
        kill_train_workers()
        while len(read_metrics(folder)) > 2:  # its successor takes back what no checkpoint has
            time.sleep(0.02)
        wait_for_steps(folder, 3)
        found["processes"].append({role: pids(task.name, role) for role in roles})

    if task.is_users_ray:
        ray.init(
            address=made.address,
            namespace="raypo",
            log_to_driver=False,
            runtime_env={"env_vars": USERS_VARIABLES},
        )
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    config = PPOConfig.load(task.config, {**task.overrides, "cluster.address": made.address})
    failures = FailureConfig(max_failures=int(task.kill_workers))
    run_config = RunConfig(name=task.name, failure_config=failures)
    result = PPOTrainer(config, run_config=run_config).fit()
    killer.join(timeout=10)
    return found | {"return": result.return_value}


SLOW = """
import time
from pathlib import Path

def while_asked(view):
    if Path(__file__).with_suffix(".flag").exists():
        time.sleep(0.5)
"""


def elastic() -> dict[str, Any]:
    """Sizes of the worker group in order, and the losses of the run and of an undisturbed one."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    from raypo import SFTConfig, SFTTrainer
    from raypo.tracking.console import Console
    from tests.integration.pipeline import sft_values, write_examples
    from tests.integration.task import read_metrics, wait_for_steps

    folder = Path(sys.argv[2])
    write_examples(folder)
    (folder / "slow.py").write_text(SLOW)
    flag = folder / "slow.flag"
    flag.touch()
    made = cluster([{"num_cpus": 1}])
    other = made.add_node(num_cpus=1)
    # Only the main thread may set the handlers of signals that a node of Ray's otherwise has.
    made._shutdown_at_exit = False
    ray.init(address=made.address, namespace="raypo", log_to_driver=False)
    values = sft_values(folder, lr=1e-4)
    values |= {"num_steps": 200, "callbacks": [f"{folder}/slow.py:while_asked"]}
    values["checkpoint"], values["eval"] = {"every": 5}, {}
    messages: list[str] = []
    show = Console.message

    def heard(self: Console, text: str) -> None:
        messages.append(text)
        show(self, text)

    def wait_for(text: str, count: int) -> None:
        deadline = time.monotonic() + 300
        while sum(text in each for each in messages) < count and time.monotonic() < deadline:
            time.sleep(0.1)

    def more_steps(count: int) -> None:
        run = folder / "runs" / "elastic"
        wait_for_steps(run, len(read_metrics(run)) + count)

    def disturb() -> None:
        more_steps(7)
        made.remove_node(other, allow_graceful=False)
        wait_for("1 of at most 2", 1)
        more_steps(7)
        again = made.add_node(num_cpus=1)
        wait_for("2 of at most 2", 2)
        more_steps(7)
        announce(again.node_id)
        wait_for("about to be preempted", 3)  # the message of a step comes before its checkpoint
        made.remove_node(again, allow_graceful=False)
        wait_for("1 of at most 2", 2)
        flag.unlink()

    Console.message = heard
    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    SFTTrainer(
        SFTConfig.parse(values | {"name": "elastic"}),
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=1.0),
        # Ray counts the announced loss only if the error of a worker that is left comes first.
        run_config=RunConfig(failure_config=FailureConfig(max_failures=2)),
    ).fit()
    disturber.join(timeout=10)
    SFTTrainer(SFTConfig.parse(values | {"name": "plain", "callbacks": []})).fit()
    losses = {
        name: [row["train/loss"] for row in read_metrics(folder / "runs" / name)]
        for name in ("elastic", "plain")
    }
    return {"messages": messages, "losses": losses}


def announce(node: str) -> None:
    """Tell Ray that the node goes in half a minute, as a provider of spot machines does."""
    from ray import _raylet
    from ray.core.generated import autoscaler_pb2

    core: Any = _raylet
    gcs = core.GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    deadline_ms = int((time.time() + 30) * 1000)
    gcs.drain_node(node, reason, "a spot machine", deadline_ms)


def sweep() -> dict[str, Any]:
    from raypo.config.sweep_config import SweepConfig
    from raypo.storage.run_files import RunFiles
    from raypo.tuning.sweep_file import run_sweep
    from tests.integration.task import wait_for_steps

    made = cluster([{"num_cpus": 0}, {"num_cpus": 2}, {"num_cpus": 2}])
    ray.init(address=made.address, namespace="raypo", log_to_driver=False)
    config = SweepConfig.load(Path(sys.argv[2]))
    files = RunFiles(config.storage_path, config.name)
    found: dict[str, Any] = {}

    def left() -> list[str]:
        """What runs hold: named actors, and placement groups that exist."""
        named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        actors = [each["name"] for each in named if each["name"].startswith("raypo:")]
        groups = ray.util.placement_group_table().values()
        return actors + [each["name"] for each in groups if each["state"] != "REMOVED"]

    def press() -> None:
        for trial in ("ahead-00000", "ahead-00001"):
            wait_for_steps(files.folder / "trials" / trial, 2)
        found["held"] = sorted(left())
        os.kill(os.getpid(), signal.SIGINT)

    def attempt(name: str) -> None:
        outcome = run_sweep(config, config.base_config(), files)
        found[name] = [record.status for record in outcome.records]
        deadline = time.monotonic() + 60
        while left() and time.monotonic() < deadline:
            time.sleep(0.5)
        found[f"{name}_left"] = left()

    threading.Thread(target=press, daemon=True).start()
    attempt("interrupted")
    attempt("resumed")
    return found


def environments(run: str) -> list[dict[str, str]]:
    """What each learner worker, engine and frozen model of a run was started with."""
    own = psutil.Process().children(recursive=True)
    workers = [each.pid for each in own if "RayTrainWorker" in " ".join(each.cmdline())]
    served = [each.pid for role in ("engine", "reference") for each in replicas(run, role)]
    told = [psutil.Process(pid).environ() for pid in (*workers, *served)]
    return [{name: each.get(name, "") for name in TOLD} for each in told]


def actors(run: str, role: str) -> list[Any]:
    found: list[Any] = []
    with suppress(ValueError):
        for number in itertools.count():
            found.append(ray.get_actor(f"raypo:{run}:{role}:{number}"))
    return found


def replicas(run: str, role: str) -> list[Any]:
    """Where each of them lives, once all are up."""
    while True:
        with suppress(RayActorError):
            return ray.get([actor.status.remote() for actor in actors(run, role)])


def pids(run: str, role: str) -> list[int]:
    return [replica.pid for replica in replicas(run, role)]


def kill_at_work(run: str) -> int:
    """SIGKILL for the first engine that is seen to work on a request; its process id."""
    while True:
        for engine in replicas(run, "engine"):
            if engine.num_calls:
                os.kill(engine.pid, signal.SIGKILL)
                return engine.pid


PROGRAMS = {"placement": placement, "colocated": colocated, "elastic": elastic, "sweep": sweep}

if __name__ == "__main__":
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.5"
    what, given = sys.argv[1:]
    if what == "elastic":  # Ray counts a lost node for a while, and starts with too many workers
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "20"
    answer = ppo(Task(**json.loads(given))) if what == "ppo" else PROGRAMS[what]()
    print(json.dumps(answer), flush=True)
    reset_ray_address()  # it would lead others to this cluster, which is gone in a moment
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # some end with those that started them
            process.kill()
    os._exit(0)
