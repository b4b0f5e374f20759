from pathlib import Path

from raypo.storage.run_files import RunFiles
from raypo.storage.summary import FATES, installed_versions, recount, sample_totals, summarize

ROWS = [
    {"step": 1, "rollout/score_mean": 0.25, "kl/ref_response_mean": 0.0, "ppo/clip_fraction": 0.1},
    {"step": 2, "rollout/score_mean": 0.5, "kl/ref_response_mean": 0.5, "eval/score_mean": 0.6},
    {"step": 3, "rollout/score_mean": 0.75, "kl/ref_response_mean": 1.5},
]


def summary(rows, **changes):
    fixed = {"status": "finished", "recipe": "ppo", "wall_s": 2.5, "versions": {"ray": "2.60.0"}}
    return summarize(rows, **(fixed | changes))


def test_summary_has_the_shape_that_readers_rely_on():
    rows = [ROWS[0] | {"eval/initial_score_mean": 0.125}, *ROWS[1:]]
    assert summary(rows) == {
        "status": "finished",
        "recipe": "ppo",
        "steps": 3,
        "wall_s": 2.5,
        "eval/score_mean": {"first": 0.125, "last": 0.6},
        "rollout/score_mean": {"first": 0.25, "last": 0.75},
        "kl/ref_response_mean": {"first": 0.0, "last": 1.5},
        "ppo/clip_fraction": {"first": 0.1, "last": 0.1},
        "versions": {"ray": "2.60.0"},
    }


def test_a_run_without_steps_says_how_it_ended():
    assert summary([], status="failed") == {
        "status": "failed",
        "recipe": "ppo",
        "steps": 0,
        "wall_s": 2.5,
        "versions": {"ray": "2.60.0"},
    }


def test_steps_that_ended_after_the_summary_was_written_are_counted(tmp_path: Path):
    """A run that is stopped at once works on until its processes are ended."""
    files = RunFiles(str(tmp_path), "r")
    recount(files)  # nothing is there
    for row in ROWS:
        files.append_metrics(row["step"], {k: v for k, v in row.items() if k != "step"})
    files.write_summary(summary(ROWS[:2], status="interrupted"))
    recount(files)
    assert files.summary() == summary(ROWS, status="interrupted")


def test_versions_of_what_is_installed_and_of_nothing_else():
    versions = installed_versions()

    assert {"python", "ray", "torch"} <= versions.keys()
    assert all(versions.values())


def accounts(step: int, **counts: float) -> dict[str, float]:
    return {"step": step} | {f"rollout/samples_{name}": n for name, n in counts.items()}


def test_every_sample_of_a_run_has_a_fate():
    """Stopped after its second step, with a batch and a half sampled ahead."""
    rows = [
        accounts(1, asked=96, trained=20, filtered=10, failed=2, dropped=0, carried=64),
        accounts(2, asked=32, asked_again=16, trained=30, dropped=2, carried=64),
    ]
    totals = sample_totals(rows)
    assert totals == {
        "sampled": 128,
        "trained": 50,
        "filtered": 10,
        "failed": 2,
        "dropped": 2,
        "asked_again": 16,
        "carried": 64,
    }
    assert totals["sampled"] == sum(totals[name] for name in (*FATES, "carried"))
    assert summary(rows)["samples"] == totals


def test_a_run_that_began_with_another_ones_checkpoint_counts_its_own_steps_and_what_was_carried():
    """Its first row is the other run's last step; what that one carried is asked for again."""
    rows = [
        accounts(7, asked=32, trained=32, carried=64),
        accounts(8, asked=0, asked_again=64, trained=32, carried=32),
        accounts(9, asked=0, trained=32, carried=0),
    ]
    totals = sample_totals(rows)
    assert (totals["sampled"], totals["trained"], totals["asked_again"]) == (64, 64, 64)
    assert sample_totals(ROWS) == {}
