"""What the tests of a session share: a local Ray, a process group, one run from start to end."""

import gc
import os
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from raypo.config import ClusterSection
from tests.integration.task import REPOSITORY, read_metrics, write_task
from tests.tiny import tiny_policy

COMPILES = (
    "test_packed_attention",
    "test_gpu_parts",
    "test_compiled_log_probs",
    "test_compiled_layers",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A vLLM of this process ends process groups that it finds, and changes how torch compiles.

    So tests that compile come before all other integration tests, and those of the group last. What
    uses Ray comes first where it has a process of its own, because it takes longest.
    """
    has_own_process = hasattr(config, "workerinput")

    def place(item: pytest.Item) -> int:
        if "unit" in item.path.parts:
            return 0
        if has_own_process and uses_ray(item.path):
            return 1
        if "group" in getattr(item, "fixturenames", ()):
            return 4
        return 2 if item.path.stem in COMPILES else 3

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # also without the plugin, like -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return TwoProcesses(config, log)


class TwoProcesses(LoadScopeScheduling):
    """Tests that use Ray share one process, with one Ray and one run; all others share the other.

    Ray's processes are nice, so the engines and learners of the other process are not slowed down.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = REPOSITORY / nodeid.split("::")[0]
        return "ray" if uses_ray(path) else "others"


@cache
def uses_ray(path: Path) -> bool:
    text = path.read_text()
    names = ("local_ray", "ray_of_six", "first: SimpleNamespace", "on_fake_gpus")
    return any(name in text for name in names)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray

    from raypo.cluster.connect import connect

    # Workers import the tests' reward functions.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    )
    connect(ClusterSection())
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny policy."""
    return str(tiny_policy(tmp_path_factory.mktemp("policy")))


@pytest.fixture(scope="session")
def group(model: str) -> Iterator[None]:
    """The one process group of this process: DeepSpeed keeps the first that it sees."""
    import torch.distributed as dist

    from tests.integration.learning import experience, learner, with_targets

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    # A first step imports all of DeepSpeed. DeepSpeed and these tests collect garbage often, which
    # takes seconds if it goes through the objects of all modules.
    started = learner(model, stage=3, dtype="bfloat16")
    started.update(with_targets(started.with_log_probs_and_values(experience())), step=1)
    del started
    gc.collect()
    gc.freeze()
    yield
    if (
        dist.is_initialized()
    ):  # an engine of this process may have ended the group when it shut down
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def few_objects(request: pytest.FixtureRequest) -> None:
    """Keep what DeepSpeed holds of earlier tests' learners out of the collections of this one."""
    if "group" in request.fixturenames:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run config beside its policy and prompts; runs go into `runs/` there."""
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def first(task: Path, local_ray: None) -> SimpleNamespace:
    """The run of the config, from its start to its end."""
    from raypo import PPOConfig, PPOTrainer

    result = PPOTrainer(PPOConfig.load(task)).fit()
    folder = task.parent / "runs" / "tiny"
    return SimpleNamespace(result=result, folder=folder, metrics=read_metrics(folder))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners get the DeepSpeed config of a GPU, and off-loading moves memory of the CPU."""
    from raypo.learner import trained_model
    from raypo.models import host_memory
    from tests.integration.off_load import configure_as_on_a_gpu

    monkeypatch.setattr(trained_model, "deepspeed_config", trained_model.deepspeed_config)
    configure_as_on_a_gpu()
    monkeypatch.setattr(host_memory, "HOST", "elsewhere")
