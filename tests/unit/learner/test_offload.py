"""What each ZeRO stage can move to the host, by DeepSpeed's own account."""

import inspect

import pytest

from raypo.learner.offload import OffloadPlan

ALL = {"optim_states", "hp_params", "lp_params", "lp_grads"}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_move_everything_by_deepspeed(stage: int):
    plan = OffloadPlan.of(stage, by_deepspeed=True)
    assert {*plan.training_state, *plan.parameters} == ALL
    assert (plan.optimizer_by_raypo, plan.parameters_by_raypo) == (False, "none")
    with_adapter = OffloadPlan.of(stage, by_deepspeed=True, has_frozen=True)
    assert with_adapter.parameters_by_raypo == "frozen"


def test_stage_3_leaves_the_optimizer_to_raypo_for_deepspeed_moves_its_fused_adam_alone():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as Stage3

    plan = OffloadPlan.of(3, by_deepspeed=True)
    assert set(plan.training_state) == {"lp_grads", "contiguous_grad_buffer"}
    assert plan.parameters == ("lp_params",)
    assert plan.optimizer_by_raypo
    assert OffloadPlan.of(3, by_deepspeed=True, has_frozen=True).parameters == ()
    # should this rule ever go, DeepSpeed can do it all
    assert "only for DeepSpeed FusedAdam" in inspect.getsource(Stage3.offload_states)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_deepspeeds_optimizer_cannot_move_raypo_moves(stage: int):
    plan = OffloadPlan.of(stage, by_deepspeed=False)
    assert (plan.optimizer_by_raypo, plan.parameters_by_raypo) == (True, "all")
    assert (plan.training_state, plan.parameters) == ((), ())


def test_the_optimizer_of_stage_1_in_bfloat16_cannot_move_itself():
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    # should it ever learn to, DeepSpeed can do it all
    assert not hasattr(BF16_Optimizer, "offload_states")


def test_with_offloaded_parameters_deepspeed_is_not_asked():
    plan = OffloadPlan.of(3, by_deepspeed=True, has_offload_param=True)
    assert (plan.training_state, plan.parameters) == ((), ())
