import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypo
from raypo.metrics.catalogue import (
    HEADLINES,
    LOGGED,
    MEANINGS,
    METRICS,
    Plot,
    doubt_about,
)

ROUNDS = "rejection_sampling"
"""A recipe that may log metrics of every group."""


def test_a_plot_takes_names_and_patterns_and_calls_lines_by_what_tells_them_apart():
    known = ["eval/pass_at_1", "eval/initial_pass_at_1", "eval/pass_at_4", "eval/loss"]
    assert Plot("", ["eval/pass_at_*"]).lines(known) == {
        "eval/pass_at_1": "1",
        "eval/pass_at_4": "4",
    }
    known = ["time/wait_for_rollouts_s", "perf/engine_idle_s"]
    assert Plot("", known).lines(known) == {
        "time/wait_for_rollouts_s": "wait for rollouts",
        "perf/engine_idle_s": "engine idle",
    }
    assert Plot("", ["eval/loss"]).lines(["eval/loss"]) == {"eval/loss": ""}
    assert Plot("", ["eval/loss"]).lines([]) == {}


def test_what_a_run_is_judged_by_is_documented():
    assert HEADLINES[0].name == "eval/score_mean"
    shown = {name for name, metric in METRICS.items() if metric.sign or metric.line}
    assert shown - {"time/step_s"} <= MEANINGS.keys()


def names_in_the_sources() -> Iterator[str]:
    """Metrics that the sources of what logs them name; `x` stands for what is filled in."""
    group = "|".join(each.rstrip("/") for each in LOGGED)
    folder = Path(raypo.__path__[0])
    for package in ("learner", "metrics", "ppo", "recipes", "rollout", "run", "weight_sync"):
        for file in (folder / package).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [
                    str(each.value) if isinstance(each, ast.Constant) else "x" for each in parts
                ]
                if re.fullmatch(rf"({group})/[a-z][a-z0-9_/]*[a-z0-9]", name := "".join(texts)):
                    yield name


def test_every_metric_that_the_sources_and_the_golden_runs_name_is_listed():
    names = set(names_in_the_sources())
    assert {"kl/coef", "train/grad_norm", "perf/x_mfu", "eval/pass_at_x"} <= names
    golden = Path(__file__).parents[2] / "golden" / "runs.json"
    names |= set(re.findall(r'"([a-z]+/[a-z_/]+)"', golden.read_text()))
    # Their names are not in one text, or they are sums of a source's and no metric.
    templates = {"ppo/x", "ppo/x_grad_norm", "eval/x", "perf/x_x_gb", "rollout/samples_x"}
    templates |= {"perf/x_s", "eval/prompts"}
    assert {name for name in names - templates if doubt_about(name, ROUNDS)} == set()


@pytest.mark.parametrize(
    ("name", "recipe", "remedy"),
    [
        ("eval/score_men", "ppo", "Did you mean eval/score_mean?"),
        ("kl/ref_respons_mean", "ppo", "Did you mean kl/ref_response_mean?"),
        ("score", "ppo", "Take a name from a run's metrics.jsonl."),
        ("train/loss", "ppo", "Did you mean eval/loss?"),
        ("rollout/score_mean", "sft", "Did you mean eval/score_mean?"),
        ("eval/score_mean/gsm8k", "ppo", None),
        ("reward/format", "ppo", None),
        ("eval/reward/format", "sft", None),
        ("eval/chosen_reward_mean", "dpo", None),
        ("train/loss", "distillation", None),
    ],
)
def test_a_metric_that_no_run_logs_is_doubted(name: str, recipe: str, remedy: str | None):
    said = doubt_about(name, recipe)
    assert said == remedy or (said and remedy and said.startswith(remedy))
