"""The process of Ray Train's controller is killed; what ran under it must not be noticed after."""

import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from ray.train import ControllerError

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import kill_train_workers, numbers, read_metrics, wait_for_steps
from tests.slow.test_sweep import alive, wait_until_nothing_is_left


def of_this_ray(title: str) -> list[psutil.Process]:
    """Processes of this test's own Ray; other runs of the machine are left alone."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def kill_controller() -> None:
    (controller,) = of_this_ray("ray::TrainController")
    controller.kill()


def test_a_run_goes_on_under_another_controller_to_the_same_numbers(
    first: SimpleNamespace, task: Path, capfd: pytest.CaptureFixture[str]
):
    """A worker is lost too, so both of the failures that it may have are used."""
    folder = task.parent / "runs" / "controlled"
    orphans: list[psutil.Process] = []

    def kill() -> None:
        wait_for_steps(folder, 3)
        kill_train_workers()
        while len(read_metrics(folder)) > 2:  # its successor takes back what no checkpoint has
            time.sleep(0.02)
        wait_for_steps(folder, 3)
        orphans.extend(of_this_ray("ray::RayTrainWorker"))
        orphans.extend(of_this_ray("ray::Engine"))
        kill_controller()

    before = alive()
    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    config = PPOConfig.load(task, {"name": "controlled", "max_failures": 2})
    result = PPOTrainer(config).fit()
    killer.join(timeout=10)
    assert orphans
    assert result.return_value == {"status": "finished", "step": 4}
    assert numbers(read_metrics(folder)) == numbers(first.metrics)
    assert not [process for process in orphans if process.is_running()]
    wait_until_nothing_is_left(before)
    assert "Ray Train's controller was lost; the run resumes" in capfd.readouterr().out


def test_without_failures_left_the_run_ends_with_the_key_that_it_takes(
    first: SimpleNamespace, task: Path
):
    folder = task.parent / "runs" / "uncontrolled"

    def kill() -> None:
        wait_for_steps(folder, 3)
        kill_controller()

    before = alive()
    threading.Thread(target=kill, daemon=True).start()
    config = PPOConfig.load(task, {"name": "uncontrolled"})
    with pytest.raises(ControllerError) as caught:
        PPOTrainer(config).fit()
    assert "max_failures (0)" in caught.value.__notes__[0]
    wait_until_nothing_is_left(before)

    result = PPOTrainer(config).fit()  # the same command
    assert result.return_value == {"status": "finished", "step": 4}
    assert numbers(read_metrics(folder)) == numbers(first.metrics)
