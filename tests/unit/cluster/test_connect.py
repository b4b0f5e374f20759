"""Addresses are tried before Ray sees them: it would retry for minutes."""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, current_thread
from types import SimpleNamespace

import grpc
import pytest

from raypo.cluster import connect as module
from raypo.cluster.connect import (
    ClusterError,
    cluster_address,
    connect,
    connected_in_background,
    dashboard_token,
    missing_environment,
    worker_environment,
)
from raypo.config import ClusterSection, ConfigError


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nothing_at_cluster_address_is_told_with_the_key(free_port: int):
    address = f"127.0.0.1:{free_port}"
    with pytest.raises(ConfigError) as caught:
        connect(ClusterSection(address=address))
    assert str(caught.value).startswith(f"cluster.address ({address}): nothing listens there")
    assert "ray start --head" in str(caught.value)


def test_nothing_at_ray_address_is_told_with_the_variable(
    free_port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port}")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS \(127"):
        connect(ClusterSection())


def test_ray_client_is_refused_with_what_works():
    with pytest.raises(ConfigError, match="ray job submit"):
        connect(ClusterSection(address="ray://head:10001"))


def test_an_address_without_a_port_is_told(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="an address is host:port"):
        connect(ClusterSection(address="headnode"))


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:port", "[::1:6379"])
def test_a_port_that_is_none_is_told(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS .*: an address is host:port"):
        connect(ClusterSection())


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HOME", "/proc/none", r"Ray writes its token to /proc/none/\.ray"),
        ("RAY_TMPDIR", "/proc/none", "Ray writes the files of its sessions to /proc/none/ray"),
        ("RAY_TMPDIR", "{folder}/file", r"file/ray, but this failed \(Not a directory\)"),
        ("RAY_TMPDIR", "{folder}/" + "x" * 107, "bytes too long for the sockets"),
        ("TMPDIR", "/proc/none", "Set RAY_TMPDIR to a short path"),
        ("RAY_TMPDIR", "{folder}/theirs", r"this failed \(Permission denied\)"),
    ],
)
def test_a_folder_that_ray_cannot_use_is_told_with_its_variable_before_ray_starts(
    variable: str, value: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def init(**_: object) -> None:
        raise AssertionError("Ray is started")

    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o711)
    (tmp_path / "file").touch()
    (tmp_path / "theirs" / "ray").mkdir(parents=True, mode=0o755)
    value = value.format(folder=tmp_path)
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(module.ray, "init", init)
    user = os.geteuid()
    if user == 0 and value.endswith("theirs"):  # root may write anywhere
        os.seteuid(54321)
    elif value.endswith("theirs"):
        (tmp_path / "theirs" / "ray").chmod(0o555)
    try:
        with pytest.raises(ConfigError, match=reason) as caught:
            connect(ClusterSection())
    finally:
        os.seteuid(user)
    assert str(caught.value).startswith(f"{variable} ({value}): ")


def test_the_config_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    assert cluster_address(ClusterSection(address="a:1")) == ("a:1", "cluster.address")
    assert cluster_address(ClusterSection()) == ("b:2", "RAY_ADDRESS")
    monkeypatch.delenv("RAY_ADDRESS")
    assert cluster_address(ClusterSection())[0] is None


def test_a_local_ray_that_does_not_come_up_is_told_in_words(monkeypatch: pytest.MonkeyPatch):
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does

    alone = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    monkeypatch.setattr(os, "environ", alone)
    monkeypatch.setattr(module.ray, "init", init)
    with pytest.raises(ClusterError, match=r"did not start .* within 30 s"):
        connect(ClusterSection())
    assert alone["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0"


def test_what_the_user_tells_nccl_torch_vllm_and_the_hub_reaches_the_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    theirs = {
        "GLOO_SOCKET_IFNAME": "eth1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "HF_HUB_OFFLINE": "1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "NCCL_CUMEM_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "true",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    environment = worker_environment()
    assert {name: environment[name] for name in theirs} == theirs
    assert environment["NCCL_DEBUG"] == "WARN"


def test_addresses_of_this_node_and_secrets_stay_here(monkeypatch: pytest.MonkeyPatch):
    names = {"VLLM_HOST_IP", "HF_TOKEN", "VLLM_API_KEY", "HF_MY_PASSWORD", "PYTHONPATH"}
    for name in (*names, "HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.setenv(name, "1")
    environment = worker_environment()
    assert not names & environment.keys()
    assert {"HF_HUB_DISABLE_IMPLICIT_TOKEN", "HF_TOKEN_PATH"} <= environment.keys()


ALL_BUT_NCCL_DEBUG = [
    *("GOMP_SPINCOUNT", "NCCL_CUMEM_ENABLE", "OMP_WAIT_POLICY"),
    *("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "TOKENIZERS_PARALLELISM"),
]


@pytest.mark.parametrize(
    ("mode", "job", "untold"),
    [
        ("worker", "theirs", ALL_BUT_NCCL_DEBUG),
        ("driver", "theirs", ALL_BUT_NCCL_DEBUG),
        ("driver", "ours", []),
    ],
)
def test_workers_of_a_ray_that_the_user_has_started_are_told_what_they_lack(
    mode: str, job: str, untold: list[str], monkeypatch: pytest.MonkeyPatch
):
    for name in [*os.environ]:
        if name in module._WORKER_DEFAULTS or name.startswith(module._FORWARDED_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    actor = {"worker": "an actor's id", "driver": None}[mode]
    said = {"env_vars": {"NCCL_DEBUG": "INFO"}}  # to ray.init, and so to all workers
    context = SimpleNamespace(get_actor_id=lambda: actor, runtime_env=said)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "_current_job", lambda: job)
    monkeypatch.setattr(module, "_connected_job", "ours")
    found = missing_environment()
    assert sorted(found) == untold
    assert found == {name: worker_environment()[name] for name in untold}


def test_what_the_job_says_is_not_said_twice(monkeypatch: pytest.MonkeyPatch):
    job = {"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}}
    monkeypatch.setenv(module.JOB_CONFIG_VARIABLE, json.dumps(job))
    beside = module._env_missing_from_job(os.environ)
    assert "NCCL_DEBUG" not in beside
    assert beside["NCCL_CUMEM_ENABLE"] == worker_environment()["NCCL_CUMEM_ENABLE"]
    monkeypatch.delenv(module.JOB_CONFIG_VARIABLE)
    assert module._env_missing_from_job(os.environ) == worker_environment()


def test_the_token_is_looked_for_where_ray_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert dashboard_token() is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("from home\n")
    assert dashboard_token() == "from home"
    (tmp_path / "named").write_text("from the named file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "named"))
    assert dashboard_token() == "from the named file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "from the variable")
    assert dashboard_token() == "from the variable"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert dashboard_token() is None


TOKEN = "0123456789abcdef"


@pytest.fixture
def asks_for_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterSection]:
    """A server that answers as the head of a Ray in token mode does; no token lies here."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        if ("authorization", f"Bearer {TOKEN}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    method = grpc.unary_unary_rpc_method_handler(answer)
    handler = grpc.method_handlers_generic_handler(
        "ray.rpc.NodeInfoGcsService", {"GetClusterId": method}
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setattr(module.ray, "init", _reached)
    yield ClusterSection(address=f"127.0.0.1:{port}")
    server.stop(None)
    monkeypatch.undo()
    module.reload_environment()


class Reached(Exception):
    """Ray itself was asked to connect or to start."""


def _reached(**arguments: object) -> None:
    raise Reached(arguments["address"])


def test_a_cluster_that_asks_for_a_token_gets_the_one_that_is_here(
    asks_for_a_token: ClusterSection, tmp_path: Path
):
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    with pytest.raises(Reached, match=str(asks_for_a_token.address)):
        connect(asks_for_a_token)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "requires a token, but none is set. Set RAY_AUTH_TOKEN to what `ray get-auth-token`"),
        ({"RAY_AUTH_TOKEN": "other"}, "requires a different token from the one that was found"),
        (
            {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"},
            r"RAY_AUTH_MODE \(disabled\): .* Set it to token",
        ),
    ],
)
def test_a_token_that_does_not_fit_is_told_before_ray_is_asked(
    asks_for_a_token: ClusterSection,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    said: str,
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        connect(asks_for_a_token)


def test_a_port_where_something_else_listens_is_told():
    def hang_up(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                listener.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=hang_up, args=(listener,), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError, match="the service there is not the head node of a Ray"):
            connect(ClusterSection(address=address))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A temporary folder of Ray, whose sockets have short paths."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def started_address(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What `ray start` leaves on a machine: a file with an address, where a port is open."""
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    monkeypatch.setattr(os, "environ", own | {"RAY_TMPDIR": str(short_path)})
    monkeypatch.setattr(module.ray, "init", _reached)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (short_path / "ray").mkdir()
        (short_path / "ray" / "ray_current_cluster").write_text(address)
        yield address


def test_a_ray_of_ones_own_says_that_another_one_runs_here(
    started_address: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(Reached, match="local"):
        connect(ClusterSection())
    assert capsys.readouterr().out == (
        "raypo: starting a new Ray beside the one that runs on this machine "
        f"({started_address}); cluster.address=auto uses the running one\n"
    )


def test_auto_is_refused_at_once_where_the_started_ray_has_ended(
    free_port: int, short_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ray would try the address of the stale file for minutes."""
    own = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    monkeypatch.setattr(os, "environ", own | {"RAY_TMPDIR": str(short_path)})
    (short_path / "ray").mkdir()
    (short_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port}")
    with pytest.raises(ConfigError) as caught:
        connect(ClusterSection(address="auto"))
    assert str(caught.value).startswith(
        f"cluster.address=auto (127.0.0.1:{free_port}): nothing listens there"
    )
    monkeypatch.setattr(module.ray, "init", _reached)
    with pytest.raises(Reached, match="local"):  # and without it, it is nothing to speak of
        connect(ClusterSection())


@pytest.mark.parametrize("users", [None, "2"])
def test_ray_trains_controller_polls_often_enough_for_steps_of_a_tenth_of_a_second(
    started_address: str, users: str | None
):
    """A step's report waits until the controller has polled the report before."""
    os.environ.pop("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", None)
    if users:
        os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = users
    with pytest.raises(Reached):
        connect(ClusterSection())
    assert float(os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"]) <= float(users or 0.1)


@pytest.mark.parametrize("connected_here", [True, False])
def test_a_command_connects_beside_its_imports_and_disconnects_what_it_connected(
    monkeypatch: pytest.MonkeyPatch, connected_here: bool
):
    imported, ended = Event(), list[str]()
    thread: list[Thread] = []

    def slow(section: ClusterSection) -> bool:
        assert imported.wait(10), "the caller went on meanwhile"
        thread.append(current_thread())
        return connected_here

    monkeypatch.setattr(module, "connect", slow)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("down"))
    with connected_in_background(ClusterSection()) as connected:
        imported.set()
        assert connected.result(10) is connected_here
        thread[0].join(0.1)
        assert thread[0].is_alive(), "with it Linux would kill the processes that it has started"
        assert ended == []
    assert ended == ["down"] * connected_here
    thread[0].join(10)
    assert not thread[0].is_alive()


def test_an_error_of_the_connection_is_told_once_and_a_refused_run_waits_for_what_it_began(
    monkeypatch: pytest.MonkeyPatch, free_port: int
):
    with (
        pytest.raises(ConfigError, match="nothing listens there"),
        connected_in_background(ClusterSection(address=f"127.0.0.1:{free_port}")) as connected,
    ):
        connected.result(10)
    begun, ended = Event(), list[str]()
    monkeypatch.setattr(module, "connect", lambda _: begun.wait(0.2) or True)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("down"))
    with pytest.raises(ConfigError, match="no model"), connected_in_background(ClusterSection()):
        raise ConfigError("no model")
    assert ended == ["down"]
    released = Event()
    monkeypatch.setattr(module, "connect", lambda _: released.wait(60.0))
    with pytest.raises(KeyboardInterrupt), connected_in_background(ClusterSection()):
        raise KeyboardInterrupt  # at once, although the connection hangs
    released.set()
    assert ended == ["down"]


def test_a_trainer_that_connects_meanwhile_waits_for_the_connection(
    monkeypatch: pytest.MonkeyPatch,
):
    """`RecipeTrainer` asks a cluster for its GPUs while the command's thread still connects."""
    begun, is_up, ended = list[Thread](), Event(), list[str]()
    context = SimpleNamespace(gcs_address="host:6379")

    def init(**_: object) -> None:
        begun.append(current_thread())
        is_up.wait(0.3)
        is_up.set()

    monkeypatch.setattr(os, "environ", dict(os.environ))
    for check in ("check_address", "_authenticate"):
        monkeypatch.setattr(module, check, lambda address, source: None)
    monkeypatch.setattr(module, "_current_job", lambda: "job")
    monkeypatch.setattr(module, "_connected_job", "")
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module.ray, "is_initialized", is_up.is_set)
    monkeypatch.setattr(module.ray, "cluster_resources", dict)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "is_driver", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: ended.append("down"))
    section = ClusterSection(address="host:6379")
    with connected_in_background(section) as connected:
        while not begun:
            time.sleep(0.01)
        assert not connect(section)
        assert connected.result(10)
        assert len(begun) == 1
    assert ended == ["down"]
