"""What of DeepSpeed is changed for workers that do not all train the same model is still there."""

import inspect

from deepspeed.runtime.zero import partitioned_param_coordinator, utils


def test_deepspeed_still_compares_the_order_of_modules_over_the_default_group():
    """Should one of these change, `raypo.learner.team_order` may be superfluous or of no effect."""
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
    from transformers.integrations import deepspeed

    assert "torch.distributed.get_rank() == 0" in inspect.getsource(deepspeed)
