"""What each ZeRO stage can move to the host, by DeepSpeed's own account."""

import inspect

import pytest

from raypo.learner.offload import OffloadPlan

ALL = {"optim_states", "hp_params", "lp_params", "lp_grads"}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_everything_by_deepspeed(stage: int):
    plan = OffloadPlan.of(stage, dtype="bfloat16")
    assert {*plan.training_state, *plan.parameters} == ALL
    assert (plan.optimizer_by_raypo, plan.parameters_by_raypo) == (False, "none")
    with_adapter = OffloadPlan.of(stage, dtype="bfloat16", has_frozen=True)
    assert with_adapter.parameters_by_raypo == "frozen"


def test_stage_3_leaves_the_optimizer_to_raypo_for_deepspeed_moves_its_fused_adam_alone():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    plan = OffloadPlan.of(3, dtype="bfloat16")
    assert set(plan.training_state) == {"lp_grads", "contiguous_grad_buffer"}
    assert plan.parameters == ("lp_params",)
    assert plan.optimizer_by_raypo
    assert OffloadPlan.of(3, dtype="bfloat16", has_frozen=True).parameters == ()
    # should this rule ever go, DeepSpeed can do it all
    assert "only for DeepSpeed FusedAdam" in inspect.getsource(Stage3.offload_states)


def test_stage_0_moves_weights_only_where_no_flat_buffer_holds_views_of_them():
    assert OffloadPlan.of(0, dtype="float32").parameters_by_raypo == "all"
    assert OffloadPlan.of(0, dtype="bfloat16").parameters_by_raypo == "none"
    assert OffloadPlan.of(0, dtype="bfloat16").optimizer_by_raypo


def test_with_offloaded_parameters_deepspeed_is_not_asked():
    plan = OffloadPlan.of(3, dtype="bfloat16", has_offload_param=True)
    assert (plan.training_state, plan.parameters) == ((), ())
