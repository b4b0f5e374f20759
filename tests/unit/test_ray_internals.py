"""What raypo uses of Ray's inside: a version that has changed it fails here first."""

import ast
import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray import tune
from ray._private import worker
from ray._private.ray_constants import ENABLE_RAY_CLUSTERS_ENV_VAR
from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.core.generated import gcs_service_pb2
from ray.exceptions import RayActorError
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.nccl_ras import NCCLRASCallback
from ray.train.v2._internal.constants import (
    CHECKPOINT_MANAGER_SNAPSHOT_FILENAME,
    ENABLE_NCCL_HANG_DETECTOR_ENV_VAR,
    NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR,
)
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    _CheckpointManagerState,
    _TrainingResultState,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.storage import StorageContext
from ray.tune import ResultGrid
from ray.tune.execution.tune_controller import TuneController
from ray.tune.experiment import Trial
from ray.tune.impl import tuner_internal
from ray.tune.schedulers import MedianStoppingRule
from ray.tune.tune import _setup_signal_catching

import raypo
from raypo import ray_internals
from raypo.ray_internals import (
    address_file,
    cause_of,
    check_shared,
    checkpoint_folder,
    dashboard_address,
    detect_nccl_hangs,
    failed_to_start,
    is_driver,
    on_loopback,
    reload_environment,
    remove_callbacks,
    replace_results,
    resume_experiment,
    run_controllers_in_process,
    run_storage,
    without_worker_output,
)
from raypo.tuning.experiment import Interruption


def private_modules(source: str) -> Iterator[str]:
    """Those of Ray that a file imports."""
    for node in ast.walk(ast.parse(source)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        yield from (n for n in names if n.startswith("ray.") and "._" in n)


def test_no_other_module_imports_anything_private_of_ray():
    package = Path(raypo.__file__).parent
    fenced = Path(ray_internals.__file__)
    found = {path: list(private_modules(path.read_text())) for path in package.rglob("*.py")}
    assert found.pop(fenced), "the search finds what there is"
    assert not any(found.values())


def trainer() -> TorchTrainer:
    return TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1))


def test_ray_train_hands_its_controllers_arguments_to_the_method_that_a_trial_replaces():
    method = "_initialize_and_run_controller"
    assert method in vars(TorchTrainer.__mro__[1]), "TorchTrainer is a DataParallelTrainer"
    assert f"self.{method}(" in inspect.getsource(TorchTrainer.fit)
    theirs: Any = inspect.signature(getattr(TorchTrainer, method))
    (kind,) = {each.kind for name, each in theirs.parameters.items() if name != "self"}
    assert kind is inspect.Parameter.VAR_KEYWORD
    assert inspect.iscoroutinefunction(TrainController.run)
    assert not inspect.iscoroutinefunction(TrainController.get_result)
    replaced = trainer()
    run_controllers_in_process(replaced)
    assert method in vars(replaced)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data's own context
def test_ray_train_makes_the_callbacks_that_a_run_goes_without():
    assert "self._create_default_callbacks()" in inspect.getsource(TorchTrainer.fit)
    unused = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
    filtered = trainer()
    before = {type(each).__name__ for each in filtered._create_default_callbacks()}
    assert unused < before
    remove_callbacks(filtered, unused)
    after = {type(each).__name__ for each in filtered._create_default_callbacks()}
    assert after == before - unused


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Data's own context
def test_the_words_of_ray_trains_detector_of_nccl_hangs_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its callback is pickled for the controller, whose logger then has the handler."""
    for name in (ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, NCCL_RAS_CONFIRM_DURATION_S_ENV_VAR):
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    told: list[str] = []
    monkeypatch.setattr(ray_internals, "test_words", told, raising=False)
    watched = trainer()
    tell = lambda text: ray_internals.test_words.append(text)  # noqa: E731 # pyright: ignore
    detect_nccl_hangs(watched, tell, confirm_s=600.0)
    (detector,) = (
        cloudpickle.loads(cloudpickle.dumps(callback))
        for callback in watched._create_default_callbacks()
        if isinstance(callback, NCCLRASCallback)
    )
    assert (detector._confirm_duration_s, detector._action) == (600.0, "observe")
    logger = logging.getLogger(NCCLRASCallback.__module__)
    workers: Any = SimpleNamespace(get_workers=list)
    try:
        for _ in range(2):  # a restart of the workers
            detector.after_worker_group_start(workers)
        logger.warning("`ncclras` binary 'ncclras' not found on the worker. Disabling ...")
        logger.info("a poll")
        logger.warning("Possible NCCL hang detected! %d of %d communicators", 1, 2)
        assert told == ["Ray Train: Possible NCCL hang detected! 1 of 2 communicators"]
    finally:
        detector.before_worker_group_shutdown(workers)
        logger.handlers.clear()
    for value in ("0", "false"):
        monkeypatch.setenv(ENABLE_NCCL_HANG_DETECTOR_ENV_VAR, value)
        off = trainer()
        detect_nccl_hangs(off, tell, confirm_s=600.0)
        callbacks = off._create_default_callbacks()
        assert not any(isinstance(each, NCCLRASCallback) for each in callbacks)


def test_a_process_outside_of_ray_is_no_driver():
    """The slow test of Ray Tune shows what `ray.init` sets and what workers have."""
    assert not is_driver()


def test_a_checkpoint_is_listed_in_the_file_and_under_the_keys_that_are_read():
    assert ray_internals.CHECKPOINTS == CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
    lists = {"checkpoint_results", "latest_checkpoint_result"}
    assert lists < _CheckpointManagerState.model_fields.keys()
    assert {"checkpoint_dir_name", "metrics"} <= _TrainingResultState.model_fields.keys()


def test_a_folder_that_the_nodes_do_not_share_is_refused_as_ray_refuses_it(tmp_path: Path):
    storage = StorageContext(str(tmp_path), "run")
    check_shared(storage)
    (marker,) = (tmp_path / "run").iterdir()
    marker.unlink()
    with pytest.raises(RuntimeError, match="all nodes in the cluster have read/write access"):
        check_shared(storage)
    system, folder = run_storage(storage)
    assert (system.type_name, folder) == ("local", str(tmp_path))
    assert checkpoint_folder(storage, "step 3") == str(tmp_path / "run" / "step 3")


def test_what_a_worker_has_raised_is_found_in_what_ray_raises():
    error = ValueError("wrong label")
    assert cause_of(UserExceptionWithTraceback(error, "a traceback")) is error
    assert cause_of(error) is error


def test_an_actor_whose_constructor_raised_has_failed_to_start():
    assert failed_to_start(RayActorError(actor_init_failed=True))
    assert not failed_to_start(RayActorError())
    assert not failed_to_start(ValueError())


def test_the_head_of_a_ray_is_asked_what_it_answers():
    _, name, method = ray_internals.CLUSTER_ID.split("/")
    services = {e.full_name: e for e in gcs_service_pb2.DESCRIPTOR.services_by_name.values()}
    assert method in services[name].methods_by_name


def test_a_submitted_job_finds_its_environment_in_the_variable_that_is_read():
    assert ray_internals.JOB_CONFIG_VARIABLE == RAY_JOB_CONFIG_JSON_ENV_VAR


def test_ray_leaves_its_address_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert address_file() == Path("/elsewhere/ray/ray_current_cluster")


def test_rays_core_can_be_told_to_read_the_environment_again():
    reload_environment()


def test_schedulers_are_handed_what_they_and_raypo_ask_of_tune():
    """`forget_failed` takes a trial out of the very set that the schedulers look at."""
    source = inspect.getsource(TuneController.get_live_trials)
    assert "return self._live_trials" in source
    assert (Trial.RUNNING, Trial.PAUSED) == ("RUNNING", "PAUSED")
    assert isinstance(inspect.getattr_static(Trial, "error_file"), property)


def test_a_tuner_is_told_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without Ray: the arguments of `tune.run` are looked at."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(tuner_internal, "run", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(tuner_internal, "ResultGrid", lambda analysis: analysis)
    tuner = tune.Tuner(
        lambda config: None, run_config=tune.RunConfig(storage_path=str(tmp_path), name="one")
    )
    resume = tune.ResumeConfig()
    resume_experiment(tuner, resume)
    tuner.fit()
    assert given["resume_config"] is resume


def test_tunes_loop_ends_at_the_signal_of_an_interruption():
    earlier = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGUSR1)}
    interrupted = _setup_signal_catching()
    try:
        stop = Interruption()
        stop.on_step_end(1, [])
        assert not interrupted.is_set()
        stop.is_wanted = True
        stop.on_step_end(2, [])
        assert interrupted.is_set()
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)


class EndedTrial:
    """Attributes of a trial that ResultGrid reads."""

    status, trial_id, path = Trial.TERMINATED, "id", "path"

    def __init__(self, name: str) -> None:
        self.name, self.last_result = name, {"x": 3}
        kept = SimpleNamespace(latest_checkpoint_result=None, best_checkpoint_results=[])
        self.run_metadata = SimpleNamespace(checkpoint_manager=kept)

    def __str__(self) -> str:
        return self.name


def test_each_result_of_a_grid_is_replaced():
    trials = [EndedTrial("one"), EndedTrial("two")]
    analysis: Any = SimpleNamespace(trials=trials, trial_dataframes={}, _fs=None)
    results = replace_results(
        ResultGrid(analysis), lambda name, result: (name, result.metrics["x"])
    )
    assert [results[0], results[1]] == [("one", 3), ("two", 3)]
    analysis.trials = trials[:1]
    assert results.get_best_result() == ("one", 3)


def test_the_median_rule_keeps_those_that_it_has_stopped():
    assert isinstance(vars(MedianStoppingRule())["_stopped_trials"], set)


def test_the_dashboard_is_that_of_the_cluster_and_not_the_default_port(
    monkeypatch: pytest.MonkeyPatch,
):
    from ray.experimental import internal_kv

    stored = {(b"webui:url", b"dashboard"): b"10.0.0.1:9999"}

    def get(key: str, namespace: bytes) -> bytes | None:
        return stored.get((key.encode(), namespace))

    monkeypatch.delenv("RAY_OVERRIDE_DASHBOARD_URL", raising=False)
    monkeypatch.setattr(internal_kv, "_internal_kv_initialized", lambda: True)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", get)
    assert dashboard_address() == "10.0.0.1:9999"
    stored.clear()
    assert dashboard_address() is None
    monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", "https://ours/ray")
    assert dashboard_address() == "https://ours/ray"


def test_output_of_workers_is_not_printed_for_a_while(capsys: pytest.CaptureFixture[str]):
    dispatcher.add_handler("ray_print_logs", lambda data: print(data["lines"]))
    try:
        with without_worker_output():
            dispatcher.emit({"lines": "of a run"})
        dispatcher.emit({"lines": "later"})
    finally:
        dispatcher.remove_handler("ray_print_logs")
    assert capsys.readouterr().out == "later\n"
    assert "global_worker_stdstream_dispatcher.add_handler(" in inspect.getsource(worker.connect)


def test_what_tells_an_autoscaler_has_its_names():
    """`tests/slow/test_autoscaler.py` asks real ones."""
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.autoscaler._private.autoscaler import AutoscalerSummary
    from ray.autoscaler._private.util import format_readonly_node_type
    from ray.autoscaler.v2.schema import ClusterStatus, NodeInfo
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    assert {"active_nodes", "idle_nodes"} <= {each.name for each in fields(AutoscalerSummary)}
    assert {"active_nodes", "idle_nodes"} <= {each.name for each in fields(ClusterStatus)}
    assert "instance_id" in {each.name for each in fields(NodeInfo)}
    assert format_readonly_node_type("ab") == "node_ab"
    assert isinstance(DEBUG_AUTOSCALING_STATUS, str)
    assert "fetch_from_server" in inspect.signature(is_autoscaler_v2).parameters
    assert all(callable(each) for each in (get_cluster_status, _internal_kv_get))


@pytest.mark.parametrize("before", [None, "1"])
def test_programs_that_a_local_ray_starts_look_for_it_on_the_loopback_interface(
    before: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(ENABLE_RAY_CLUSTERS_ENV_VAR, raising=False)
    if before:
        monkeypatch.setenv(ENABLE_RAY_CLUSTERS_ENV_VAR, before)
    with on_loopback():
        program = "from ray._private.services import canonicalize_bootstrap_address as address; "
        program += "print(address('127.0.0.1:6379'))"
        joined = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
    assert joined.stdout.strip() == "127.0.0.1:6379"
    assert os.environ.get(ENABLE_RAY_CLUSTERS_ENV_VAR) == before
