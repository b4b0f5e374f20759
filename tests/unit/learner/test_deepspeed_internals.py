"""Private names of DeepSpeed that raypo uses: a version that has changed one fails here first."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import deepspeed
import pytest
import torch
from deepspeed.runtime import bf16_optimizer, engine
from deepspeed.runtime.zero import (
    muon,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
    stage_1_and_2,
    utils,
)
from deepspeed.runtime.zero.muon import muon_optimizer
from deepspeed.utils import fragment_address, mixed_precision_linkage, tensor_fragment
from torch import nn
from transformers import modeling_utils
from transformers.integrations import deepspeed as integration

import raypo
from raypo.learner import deepspeed_internals
from raypo.learner.deepspeed_internals import exact_buffers, import_deepspeed
from raypo.models import shares

comm = importlib.import_module("deepspeed.comm.torch")  # `deepspeed.comm.torch` is torch itself

STAGE_3 = (
    "grad_position",
    "get_param_id",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
    "communication_data_type",
    "ipg_buckets",
    "checkpoint_event_prologue",
    "checkpoint_event_epilogue",
    "_reassign_or_swap_out_partitioned_parameters",
)
NAMES: dict[type, tuple[str, ...]] = {
    engine.DeepSpeedEngine: ("enable_backward_allreduce", "_unmanaged_backward_count"),
    stage3.DeepSpeedZeroOptimizer_Stage3: STAGE_3,
    stage_1_and_2.DeepSpeedZeroOptimizer: ("params_in_partition", "update_lp_params"),
    bf16_optimizer.BF16_Optimizer: ("fp32_groups_gradients_flat", "update_lp_params"),
}
"""Methods, and attributes that a method sets, by their class."""
OF_PARAMETERS = ("ds_id", "ds_tensor", "ds_numel", "ds_shape", "all_gather", "partition")
"""Attributes that `zero.Init` adds to a parameter."""


def assigned(source: type | ModuleType) -> Iterator[str]:
    """Names of the attributes that the source sets, and of its functions."""
    for node in ast.walk(ast.parse(inspect.getsource(source))):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.attr for target in targets if isinstance(target, ast.Attribute))


@pytest.mark.parametrize("owner", NAMES, ids=lambda owner: owner.__name__)
def test_a_class_has_the_attributes_that_are_read(owner: type):
    assert {*NAMES[owner]} <= {*assigned(owner)}


def test_zero_init_adds_the_attributes_that_are_read():
    assert {*OF_PARAMETERS} <= {*assigned(partition_parameters)}


def test_no_other_module_uses_a_private_name_of_deepspeed():
    package = Path(raypo.__file__).parent
    names = {*OF_PARAMETERS[:4], "_hp_mapping"}.union(*NAMES.values())
    names.remove("communication_data_type")  # also a key of DeepSpeed's config
    users = {}
    for path in package.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        words |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        users[path] = words & names
    inside = users.pop(Path(deepspeed_internals.__file__)) | users.pop(Path(shares.__file__))
    assert inside == names, "the search finds what there is"
    assert not any(users.values())


def test_a_part_of_a_parameter_of_stages_1_and_2_says_where_it_is():
    assert "_hp_mapping" in {*assigned(mixed_precision_linkage)}
    names = {field.name for field in fields(tensor_fragment)}
    assert {"param_group_index", "lp_fragment_address", "hp_fragment_address"} <= names
    assert {"start", "numel"} <= {field.name for field in fields(fragment_address)}


def test_the_position_of_a_gradient_is_group_offset_and_share():
    source = inspect.getsource(stage3.DeepSpeedZeroOptimizer_Stage3.set_grad_positions)
    assert "param_id = self.get_param_id(param)" in source
    position = "[int(i), int(current_offset), int(num_elements)]"
    assert f"self.grad_position[param_id] = {position}" in source
    assert "num_elements = param.partition_numel()" in source


def test_a_bucket_of_stage_3_has_a_buffer():
    assert "buffer" in {field.name for field in fields(stage3.IPGBucketZ3)}


def test_weights_of_stage_3_are_read_again_from_a_group_of_masters():
    source = inspect.getsource(stage3.DeepSpeedZeroOptimizer_Stage3)
    assert "def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id):" in source
    assert "def checkpoint_event_prologue(self):" in source
    assert "def checkpoint_event_epilogue(self):" in source


def test_a_single_worker_reduces_its_gradients_unless_it_is_told_not_to():
    source = inspect.getsource(engine.DeepSpeedEngine)
    assert "if self.enable_backward_allreduce and not" in source


def test_muon_is_known_by_its_mark():
    for stage in (stage3, stage_1_and_2):
        assert 'getattr(param, "use_muon", False)' in inspect.getsource(stage).replace("'", '"')
    arguments = inspect.signature(muon_optimizer.MuonWithAuxAdam).parameters
    assert {"adam_optimizer", "adam_optimizer_kwargs"} <= arguments.keys()
    assert muon_optimizer.__name__.startswith(muon.__name__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's op is another one")
def test_the_op_for_inference_is_not_compiled_on_cpus():
    assert not import_deepspeed().ops.__compatible_ops__["deepspeed_shm_comm"]
    assert "__compatible_ops__.get(builder.NAME" in inspect.getsource(comm)


def test_buffers_that_transformers_creates_in_shards_are_not_rounded():
    """The test of `Init` itself is that of loading in shards (tests/integration/test_shares.py)."""
    assert "deepspeed.zero.Init(config_dict_or_path=" in inspect.getsource(modeling_utils)
    original = deepspeed.zero.Init
    method = inspect.signature(original._post_init_method)
    assert [*method.parameters] == ["self", "module"]
    assert "tensor_overrides" in inspect.signature(original.__init__).parameters
    with exact_buffers():
        assert issubclass(deepspeed.zero.Init, original)
        assert deepspeed.zero.Init is not original
    assert deepspeed.zero.Init is original
    assert deepspeed.zero.DeepSpeedTensorOverride.device


def test_without_a_deepspeed_config_networks_are_built_without_shards():
    assert hasattr(integration, "_hf_deepspeed_config_weak_ref")
    with shares.without_shards():
        assert not integration.is_deepspeed_zero3_enabled()


def test_deepspeed_still_compares_the_order_of_modules_over_the_default_group():
    """Should one of these change, `compare_within` may be superfluous or of no effect."""
    checks = inspect.getsource(utils.assert_ints_same_as_other_ranks)
    checks += inspect.getsource(utils.assert_lst_len_same_as_other_ranks)
    checks += inspect.getsource(utils.get_lst_from_rank0)
    assert "broadcast" in checks
    assert "group" not in checks
    coordinator = partitioned_param_coordinator
    assert "assert_ints_same_as_other_ranks(" in inspect.getsource(
        coordinator.PartitionedParameterCoordinator.reset_step
    )
    assert coordinator.assert_ints_same_as_other_ranks is utils.assert_ints_same_as_other_ranks


def test_transformers_still_fills_shares_from_rank_0_of_all_workers():
    """Why each worker of a team loads the whole model: else rank 0 would be the team's own."""
    assert "torch.distributed.get_rank() == 0" in inspect.getsource(integration)


def test_a_plain_parameter_is_its_own_whole():
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert not shares.is_sharded(weight)
    assert (shares.whole_shape(weight), shares.whole_numel(weight)) == ((2, 3), 6)
    assert shares.whole_bytes(weight) == 12
