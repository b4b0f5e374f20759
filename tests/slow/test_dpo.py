"""A dpo run that is interrupted and goes on."""

from pathlib import Path
from typing import Any

from tests.integration.pipeline import dpo_values
from tests.integration.test_dpo import fit, folder, whole

__all__ = ["folder", "whole"]

FAILS_ONCE = """
from pathlib import Path

from tests.integration.task import digit_share


def digit_share_at_last(rollouts):
    with Path(__file__).with_name("calls").open("a+") as calls:
        calls.write(".")
        calls.seek(0)
        if len(calls.read()) == 3:
            raise RuntimeError("the judge is out")
    return digit_share(rollouts)
"""


def figures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the numbers of a run are, without its times."""
    kept = ("step", "train/", "eval/")
    return [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]


def test_a_run_that_fails_goes_on_from_its_checkpoint_to_the_same_figures(
    folder: Path, local_ray: None, whole: tuple[Path, list[dict[str, Any]]]
):
    judge = folder / "judge.py"
    judge.write_text(FAILS_ONCE)
    evaluation = dpo_values(folder)["eval"] | {"function": f"{judge}:digit_share_at_last"}
    _, rows = fit(folder, "resumed", eval=evaluation, max_failures=1)
    assert len((folder / "calls").read_text()) == 4  # before, at 3, at 6 in vain, at 6
    assert figures(rows) == figures(whole[1])
