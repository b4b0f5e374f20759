"""What the tests of a session share: a local Ray, a process group, one run from start to end."""

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from raypo.config import ClusterSection
from tests.integration.task import REPOSITORY, read_metrics, write_task
from tests.tiny import tiny_policy

COMPILES = ("test_packed_attention", "test_gpu_parts", "test_compiled_log_probs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, and tell pytest-xdist which of them share a process.

    A vLLM of this process ends process groups that it finds, and changes how torch compiles. So
    tests that compile come before all other integration tests, and those of the group last.
    All that use Ray share a process, and with it one Ray and one run; with two processes they come
    first, because they take longest. Ray's processes are nice, so the others are not slowed down.
    """
    is_shared = hasattr(config, "workerinput")

    def place(item: pytest.Item) -> int:
        if "unit" in item.path.parts:
            return 0
        if "group" in getattr(item, "fixturenames", ()):
            return 4
        if item.path.stem in COMPILES:
            return 2
        return 1 if is_shared and uses_ray(item) else 3

    items.sort(key=place)
    for item in items if is_shared else ():
        names = {1: "ray", 4: "deepspeed"}
        item.add_marker(pytest.mark.xdist_group(names.get(place(item), item.path.stem)))


def uses_ray(item: pytest.Item) -> bool:
    starts_its_own = item.path.stem == "test_fake_gpus"
    return starts_its_own or "local_ray" in getattr(item, "fixturenames", ())


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
    dist.destroy_process_group()


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
