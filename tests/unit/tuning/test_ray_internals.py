"""What a sweep uses of Ray's inside: a version that has changed it fails here first."""

import inspect
from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.controller import TrainController
from ray.tune.schedulers import MedianStoppingRule


def test_ray_train_hands_its_controllers_arguments_to_the_method_that_a_trial_replaces():
    method = "_initialize_and_run_controller"
    assert method in vars(TorchTrainer.__mro__[1]), "TorchTrainer is a DataParallelTrainer"
    assert f"self.{method}(" in inspect.getsource(TorchTrainer.fit)
    theirs: Any = inspect.signature(getattr(TorchTrainer, method))
    (kind,) = {each.kind for name, each in theirs.parameters.items() if name != "self"}
    assert kind is inspect.Parameter.VAR_KEYWORD
    assert inspect.iscoroutinefunction(TrainController.run)
    assert not inspect.iscoroutinefunction(TrainController.get_result)


def test_the_median_rule_keeps_those_that_it_has_stopped():
    assert isinstance(vars(MedianStoppingRule())["_stopped_trials"], set)
