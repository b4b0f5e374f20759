"""What was found by reading the code for GPUs: where each finding is tested, on a CPU and on one.

On a CPU gloo stands for NCCL, and the pinned sources and plain arithmetic for what only a GPU has.
Where there can be no test stands the reason.
"""

from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OFF_LOAD, CLUSTER = "integration/test_offload.py", "unit/test_examples_cluster.py"
PLAN, TIMES, TRAINER = (
    "unit/plan/test_plan.py",
    "unit/plan/test_times.py",
    "unit/test_trainer.py",
)
PARTS, TRANSPORTS, SEVERAL = "gpu/parts.py", "gpu/test_transports.py", "gpu/test_several_gpus.py"
RUNS = (SEVERAL, "test_a_run_agrees")
NO_GPU = "no GPU takes part in it"

FINDINGS = {
    1: "in bfloat16 at stage 1 nothing could be off-loaded",
    2: "at stage 3 each worker loaded the whole model",
    3: "slurm.sh hung: only its head asked for a token",
    4: "the tests on GPUs had no LOCAL_RANK, and ended the group that DeepSpeed keeps",
    5: "two pinned packages brought the same files",
    6: "rayjob.yaml asked for less RAM than the plan",
    7: "float32 was the default where attention computes in TF32",
    8: "an engine that was lost came back while the learner had the GPU",
    9: "joining NCCL had no time-out, and engines that share a GPU no guard",
    10: "all that shares a GPU was awake at the start",
    11: "under a driver too old for torch's CUDA all ran on CPUs without a word",
    12: "checkpoints were staged in the temporary folder",
    13: "of each frozen model there was one a node",
    14: "counts and rollouts went over NCCL",
    15: "tensor-parallel engines were asked batch after batch",
    16: "no overlap; host memory was pinned anew; weights were kept that a push replaces",
    17: "there was no acceptance",
}

ON_CPU = {
    1: [(OFF_LOAD, "test_off_and_back_changes_nothing")],
    2: [
        ("integration/test_shares.py", "test_each_worker_holds_its_share_and_what_is_on_its_way"),
        ("slow/test_shares.py", "test_a_model_of_one_and_a_half_billion_weights_on_four_workers"),
        (PLAN, "test_a_model_that_its_workers_load_whole_is_planned_for_at_stage_3"),
    ],
    3: [
        (CLUSTER, "test_all_nodes_of_a_slurm_job_have_one_token_their_cores_and_an_address"),
        ("slow/test_cluster.py", "test_a_slurm_job_trains_on_both_of_its_nodes"),
    ],
    # The same stages over a group of gloo, made as that of the tests on GPUs is.
    4: [("integration/conftest.py", "group"), (OFF_LOAD, "test_off_and_back_changes_nothing")],
    5: [("unit/test_pins.py", "test_no_two_packages_of_the_cuda_set_bring_the_same_files")],
    6: [(CLUSTER, "test_the_nodes_of_the_manifest_hold_what_the_plan_asks_for_seven_billion")],
    7: [(TRAINER, "test_the_dtype_is_decided_where_the_devices_are_known")],
    8: [("unit/deployment/test_replica.py", "test_one_that_takes_turns_takes_its_memory_again")],
    9: [
        (
            "unit/weight_sync/test_broadcast.py",
            "test_a_member_that_never_connects_is_waited_for_no",
        ),
        ("unit/config/test_transport_keys.py", "test_engines_that_share_a_gpu_are_no_members_of"),
    ],
    10: [("integration/test_start_in_turn.py", "test_each_role_makes_room_before_the_next_one")],
    11: [
        ("unit/cluster/test_devices.py", "test_gpus_that_torch_cannot_use_are_no_reason_to"),
        (TRAINER, "test_gpus_that_are_asked_for_and_that_torch_cannot_use_are_refused"),
        ("unit/cluster/test_torch_config.py", "test_a_worker_whose_torch_sees_none_of_its_gpus"),
    ],
    12: [("unit/storage/test_run_files.py", "test_a_checkpoint_is_staged_where_it_will_lie")],
    13: [
        (PLAN, "test_frozen_models_lie_on_every_gpu_or_as_often_as_is_asked"),
        (TIMES, "test_frozen_models_score_eight_times_as_fast_on_eight_devices"),
    ],
    14: [("unit/ppo/test_ppo_workers.py", "test_counts_and_rollouts_go_over_gloo")],
    15: [
        ("integration/test_engine_callers.py", "test_many_callers_share_the_steps_of_one_engine"),
        ("integration/test_engine_joins.py", "test_what_joins_is_sampled_as_alone_and_does_not"),
    ],
    16: [
        ("integration/test_workers.py", "test_several_workers_with_gpus_sum_gradients_meanwhile"),
        ("integration/test_gpu_config.py", "test_a_worker_alone_sums_nothing_in_the_background"),
        ("unit/plan/test_memory.py", "test_gradients_are_summed_meanwhile_on_gpus"),
        ("unit/models/test_host_memory.py", "test_the_places_on_the_host_are_used_again"),
        ("unit/run/test_phases.py", "test_weights_that_a_push_replaces_are_not_kept_over_the"),
        (TIMES, "test_an_engines_weights_pass_to_the_host_only_where_no_push_replaces_them"),
    ],
    17: [
        ("unit/test_gpu_acceptance.py", "test_each_part_says_what_it_found_or_why_it_failed"),
        ("integration/test_gpu_parts.py", "test_runs_on_several_gpus_are_possible_and_push_the"),
        ("slow/test_gpu_parts.py", "test_a_run_is_killed_goes_on_and_is_told_beside_its_plan"),
    ],
}

OFF_LOADED = (TRANSPORTS, "test_a_learner_off_loaded_leaves_the_gpu_and_comes_back")
ON_GPU = {
    1: [OFF_LOADED, (PARTS, "off_load")],
    2: [RUNS],
    3: NO_GPU,
    4: [OFF_LOADED, (TRANSPORTS, "nccl")],
    5: [(PARTS, "packages")],
    6: NO_GPU,
    7: [(PARTS, "engine"), (PARTS, "engine_in_float32")],
    8: [(TRANSPORTS, "test_an_engine_that_is_lost_while_the_learner_updates_comes_back_in_its")],
    9: [(PARTS, "group"), (SEVERAL, "test_nccl_reaches_an_engine_on_another_gpu_and_survives")],
    10: [(PARTS, "run")],
    11: [(PARTS, "driver")],
    12: NO_GPU,
    13: [RUNS],
    14: [RUNS],
    15: [RUNS],
    16: [(PARTS, "run"), (TRANSPORTS, "test_a_colocated_run_agrees_at_each_stage")],
    17: [("gpu/acceptance.py", "main")],
}


@pytest.mark.parametrize("finding", FINDINGS)
def test_each_finding_has_a_test_on_a_cpu_and_on_a_gpu_or_a_reason(finding: int):
    for where in (ON_CPU[finding], ON_GPU[finding]):
        assert where
        for file, name in [] if isinstance(where, str) else where:
            assert f"def {name}" in (TESTS / file).read_text(), (file, name)


def test_all_of_them_are_here():
    assert [*FINDINGS] == [*ON_CPU] == [*ON_GPU] == [*range(1, 18)]
