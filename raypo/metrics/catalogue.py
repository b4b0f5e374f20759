"""Labels, plots and descriptions of a run's metrics.

The console, the report, Grafana's dashboard, `summary.json`, `raypo status` and the table in
docs/outputs.md (`make docs`) are made from these tables.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""The metrics of one step, including the key `step`."""


class Metric(NamedTuple):
    """Label and display settings of a metric."""

    name: str
    label: str
    """Human-readable name, with the unit after a comma."""
    sign: int = 0
    """Direction of a metric that measures success: 1 if higher is better, -1 if lower is."""
    line: str = ""
    """Format of the value in a console step line. Empty means that the line omits it."""
    tile: bool = False
    """True if the report shows the metric in its overview tiles."""
    unless_zero: bool = False
    """True if the console and the tiles omit the metric when its value is 0."""


METRICS = {
    metric.name: metric
    for metric in (
        Metric("eval/score_mean", "held-out score", 1, "eval {:+.3f}", tile=True),
        Metric("eval/accuracy", "held-out accuracy", 1, "eval accuracy {:.1%}", tile=True),
        Metric("eval/loss", "held-out loss", -1, "eval loss {:.4f}", tile=True),
        Metric("eval/reward_model_mean", "reward model, held out"),
        Metric("eval/margin_mean", "held-out margin"),
        Metric("rollout/score_mean", "training score", 1, "score {:+.3f}", tile=True),
        Metric("train/accuracy", "training accuracy", 1, "accuracy {:.1%}"),
        Metric("train/loss", "training loss", -1, "loss {:.4f}", tile=True),
        Metric("kl/ref_response_mean", "KL, nats per response", line="kl {:.3g}", tile=True),
        Metric("kl/ref_mean", "KL, nats per token"),
        Metric("rollout/response_tokens_mean", "response tokens", line="length {:.1f}", tile=True),
        Metric(
            "rollout/truncated_fraction",
            "cut-off responses",
            line="cut off {:.0%}",
            tile=True,
            unless_zero=True,
        ),
        Metric("ppo/entropy", "entropy, nats per token", line="entropy {:.2f}", tile=True),
        Metric("ppo/clip_fraction", "clipped tokens", tile=True),
        Metric("perf/samples_per_s", "samples per second"),
        Metric("perf/response_tokens_per_s", "response tokens per second", tile=True),
        Metric("time/step_s", "seconds per step", line="{:.1f} s", tile=True),
        Metric("rollout/staleness_mean", "staleness", line="staleness {:.1f}", unless_zero=True),
        Metric("time/wait_for_rollouts_s", "wait for rollouts", line="waited {:.1f} s"),
        Metric("perf/engine_idle_s", "engine idle", line="engines idle {:.1f} s"),
        Metric("time/log_probs_s", "old log-probs and values"),
        Metric("time/held_out_s", "held-out score"),
    )
}
"""Metrics by name. Among those that measure success, the most informative come first."""

HEADLINES = tuple(metric for metric in METRICS.values() if metric.sign)
TRAINED = METRICS["rollout/score_mean"], METRICS["train/loss"]
"""Metrics of the training objective. The recipe decides which of the two a run has."""


def label_of(name: str) -> str:
    """Return the label of a metric, or the last part of its name if it has none."""
    if name in METRICS:
        return METRICS[name].label
    return name.rpartition("/")[2].removesuffix("_s").replace("_", " ")


class Plot(NamedTuple):
    """Metrics plotted by step on one pair of axes."""

    title: str
    metrics: Sequence[str]
    """Metric names, or patterns like `eval/pass_at_*`."""
    unit: str = ""

    def lines(self, logged: Iterable[str]) -> dict[str, str]:
        """Return the logged metrics that the plot draws, with their legend labels.

        Labels are the words in which the names differ: `mean` and `max` for `..._mean`, `..._max`.
        A part of a score is labelled with its name.
        """
        logged = sorted({name for name in logged if "/initial_" not in name})
        names = [name for pattern in self.metrics for name in logged if fnmatchcase(name, pattern)]
        if self.metrics[0].endswith("reward/*"):
            return {name: name.partition("reward/")[2] for name in names}
        words = [re.split("[/_]", name) for name in names]
        shared = {"time", "perf"}.union(set(words[0]).intersection(*words[1:]) if words else ())
        labels = (" ".join(word for word in parts if word not in shared) for parts in words)
        return dict(zip(names, labels, strict=True))


_OF_EXAMPLES = (
    "loss accuracy margin_mean score_gap_mean pair_score_mean *_reward_mean *_log_prob_mean "
    "*_tokens_mean kl teacher_told"
)
"""Names that the tasks of `raypo.learner` report, with `train/` or `eval/` before them."""
LOGGED = {
    "eval/": f"score_mean score_mean/* initial_* reward_model_mean response_tokens_mean failed "
    f"pass_at_* reward/* episode/* {_OF_EXAMPLES}",
    "train/": f"learning_rate grad_norm examples tokens skipped_updates updates router_load_max "
    f"router_entropy router_aux_loss "
    f"{_OF_EXAMPLES}",
    "rollout/": "score_mean score_mean/* score_std response_tokens response_tokens_mean "
    "response_tokens_max prompt_tokens_mean truncated_fraction zero_variance_fraction turns_mean "
    "turns_max episodes_failed refills groups_missing staleness_mean staleness_max "
    "staleness_share_* samples_asked samples_asked_again samples_carried samples_dropped "
    "samples_sampled samples_trained samples_failed samples_filtered samples_empty tail_fraction "
    "score_length_correlation truncated_score_gap turn_header_fraction *_label_fraction "
    "labels_compared",
    "data/": "duplicate_fraction held_out_overlap",
    "reward/": "*",
    "episode/": "*",
    "kl/": "ref_mean ref_response_mean coef clamped_tokens",
    "ppo/": "policy_loss value_loss kl_loss nll_loss entropy entropy_coef entropy_threshold "
    "approx_kl clip_fraction dual_clip_fraction off_policy_fraction value_clip_fraction "
    "advantage_clip_fraction advantage_abs_mean "
    "ratio_mean ratio_clamped_tokens value_mean return_mean "
    "shaped_score_mean explained_variance policy_grad_norm critic_grad_norm policy_learning_rate "
    "critic_learning_rate policy_updates skipped_updates router_load_max router_entropy "
    "router_aux_loss",
    "mismatch/": "kl* log_prob_gap_mean* log_prob_gap_max* clip_fraction* weight_mean "
    "dropped_fraction probe_gap_* unknown_tokens router_disagreement",
    "curriculum/": "pass_rate_p* step_pass_rate seen_fraction",
    "selection/": "responses prompts prompts_* pairs score_mean score_gap_mean",
    "tools/": "calls_mean failures",
    "time/": "*_s",
    "perf/": "*_per_s *mfu peak_tflops memory_*_gb gpu_memory_*_gb engine_* wait_for_*_s "
    "environment_s_mean environment_s_max tools_s_mean draft_acceptance slowest_*",
}
"""Names, or patterns of names, of all metrics that a run can log besides those of its callbacks."""
_NOT_OF = {
    "ppo": ("train/", "selection/"),
    **dict.fromkeys(
        ("sft", "dpo", "reward_model"),
        ("rollout/", "reward/", "episode/", "kl/", "ppo/", "curriculum/", "selection/", "tools/"),
    ),
}
"""Groups of metrics that the runs of a recipe never log."""


def doubt_about(name: str, recipe: str) -> str | None:
    """Return a remedy if no run of a recipe logs a metric, unless a callback adds it.

    None means that a run may log the metric.
    """
    names = [
        f"{group}{metric}"
        for group, metrics in LOGGED.items()
        if group not in _NOT_OF.get(recipe, ())
        for metric in metrics.split()
    ]
    if any(fnmatchcase(name, pattern) for pattern in names):
        return None
    plain = [metric for metric in names if "*" not in metric]
    near = difflib.get_close_matches(name, plain, n=1)
    return f"Did you mean {near[0]}?" if near else "Take a name from a run's metrics.jsonl."


PLOTS: dict[str, tuple[Plot, ...]] = {
    "Learning": (
        *(
            Plot(metric.label.capitalize(), [metric.name])
            for metric in HEADLINES
            if not metric.name.endswith("score_mean")  # the training objective has its own plot
        ),
        Plot("Implicit rewards", ["*/*_reward_mean"], "beta x log-ratio"),
        Plot("Log-probabilities", ["*/*_log_prob_mean"], "nats per response"),
        Plot("Margin: chosen minus rejected", ["eval/margin_mean", "train/margin_mean"], "reward"),
        Plot("Held out, pass@k", ["eval/pass_at_*"], "share of prompts"),
        Plot(
            "Pass rates of the prompts",
            ["curriculum/pass_rate_p*", "curriculum/step_pass_rate"],
            "quantiles over prompts, and of a step's samples",
        ),
        Plot("Parts of the score", ["reward/*"], "mean over samples"),
        Plot("Parts of the score, held out", ["eval/reward/*"], "mean over samples"),
        Plot("Spread of the scores", ["rollout/score_std"], "std over samples"),
    ),
    "Distance from the reference": (
        Plot("KL to the reference", ["kl/ref_response_mean"], "nats per response"),
        Plot("KL coefficient", ["kl/coef"]),
    ),
    "Length and entropy": (
        Plot("Response length", ["rollout/response_tokens_m*"], "tokens"),
        Plot("Entropy", ["ppo/entropy"], "nats per token"),
        Plot("Cut off at max_new_tokens", ["rollout/truncated_fraction"], "share of responses"),
        Plot("Groups of equal scores", ["rollout/zero_variance_fraction"], "share of groups"),
    ),
    "Updates": (
        Plot("Selected in a round", ["selection/responses", "selection/p*"], "of all workers"),
        Plot("Score of the selected responses", ["selection/score_mean"]),
        Plot("Score gap of the pairs", ["selection/score_gap_mean"]),
        Plot("Probability of the teacher's top tokens", ["train/teacher_told"]),
        Plot("Clipped tokens", ["ppo/clip_fraction"], "share"),
        Plot("KL of an update", ["ppo/approx_kl"], "nats per token"),
        Plot("Policy loss", ["ppo/policy_loss"]),
        Plot("Value loss", ["ppo/value_loss"]),
        Plot("Variance of the returns that the critic explains", ["ppo/explained_variance"]),
        Plot("Gradient norms", ["ppo/*_grad_norm", "train/grad_norm"]),
        Plot("Load of the busiest expert", ["*/router_load_max"], "times an even load"),
        Plot("Learning rate", ["ppo/*_learning_rate", "train/learning_rate"]),
        Plot("KL that KTO compares with", ["train/kl"], "nats per response"),
        Plot("Engine against learner", ["mismatch/kl"], "nats per token"),
        Plot("Age of the samples", ["rollout/staleness_m*"], "updates"),
        Plot("Tokens by their age in updates", ["rollout/staleness_share_*"], "share"),
    ),
    "Time and memory": (
        Plot("Response tokens per second", ["perf/response_tokens_per_s"], "tokens"),
        Plot("Samples per second", ["perf/samples_per_s"], "samples"),
        Plot(
            "Who waits",
            ["time/wait_for_rollouts_s", "perf/wait_for_engines_s", "perf/engine_idle_s"],
            "seconds of a step",
        ),
        Plot(
            "Tokens per second of each phase",
            [f"perf/{phase}_tokens_per_s" for phase in ("generate", "log_probs", "update")],
            "tokens",
        ),
        Plot("Model FLOPs utilisation", ["perf/*mfu"], "share of the devices' peak"),
    ),
}
"""Plots by section, for the report's sections and the rows of Grafana's dashboard."""


def before_and_after(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Return a metric's values before the first update and at the end.

    If it was not measured before the first update, its first value is returned instead. None means
    that the metric has no values.
    """
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    start = reference(rows, name)
    if not values:
        return None
    return (values[0] if start is None else start), values[-1]


def reference(rows: Sequence[Row], name: str) -> float | None:
    """Return a metric before the first update: `eval/initial_score_mean` for `eval/score_mean`.

    Rollouts of step 1 are sampled before the first update, so for `rollout/` metrics the value of
    the first row is returned. None means that the metric was not measured then.
    """
    if not rows:
        return None
    group, _, metric = name.partition("/")
    stored = rows[0].get(f"{group}/initial_{metric}")
    if stored is None and group == "rollout" and rows[0].get("step") == 1:
        stored = rows[0].get(name)
    return stored if stored is not None and math.isfinite(stored) else None


MEANINGS = {
    "eval/score_mean": "the score of held-out prompts, by `eval.function`",
    "eval/accuracy": "share of held-out pairs, or verdicts, that the model predicts correctly",
    "eval/loss": "the loss of held-out examples",
    "eval/pass_at_<k>": (
        "share of held-out prompts with a correct answer among k samples, over the prompts with "
        "k scored samples"
    ),
    "rollout/score_mean": "the training score, before KL and shaping",
    "curriculum/pass_rate_p<q>": "quantile of the prompts' mean pass rates, over the prompts "
    "sampled so far: [Curriculum](methods.md#curriculum)",
    "curriculum/step_pass_rate": "share of a step's samples that passed",
    "curriculum/seen_fraction": "share of all prompts that have been sampled so far",
    "selection/responses": "samples that a round trains on",
    "selection/prompts_too_long": (
        "samples left out of training because their teacher's prompt is too long: "
        "[Self-distillation](recipes.md#self-distillation)"
    ),
    "rollout/score_mean/<source>": (
        "the training score for each [source](your-own-run.md#prompts-and-examples), if there "
        "are several; also for `eval/`"
    ),
    "reward/<name>": "a named part of the score, as the reward function returns it",
    "rollout/response_tokens_mean": (
        "number of tokens that the policy sampled for a response. An agent's whole episode "
        "counts as one response. Also for `eval/`"
    ),
    "rollout/truncated_fraction": (
        "share of responses cut off at `rollout.max_new_tokens`, or of episodes with a response "
        "that was cut off"
    ),
    "rollout/truncated_score_gap": "mean score of the responses that ended, minus that of those "
    "that were cut off",
    "rollout/tail_fraction": "share of the longest response by which it exceeds all but the "
    "longest 3 %",
    "rollout/score_length_correlation": "correlation of score and length within groups",
    "rollout/turn_header_fraction": "share of responses in which the policy itself wrote the "
    "header with which the chat template begins an answer",
    "rollout/own_label_fraction": "share of responses that end with their row's label, among rows "
    "whose neighbours have other labels and whose prompt has none of the three; also "
    "`previous_label_fraction` and `next_label_fraction`, of the neighbours' labels",
    "data/duplicate_fraction": "share of the training prompts that repeat an earlier one "
    "and its label; not of episodes",
    "data/held_out_overlap": "share of the held-out prompts that are also training prompts "
    "with the same label; not of episodes",
    "rollout/turns_mean": "turns of the policy, with an [environment](environments.md)",
    "rollout/episodes_failed": "episodes without a score",
    "rollout/staleness_mean": "weight versions between a response and the update that trains it: "
    "[Sampling while the learner updates](asynchronous.md)",
    "rollout/staleness_share_<k>": (
        "share of the tokens that are k weight versions old, if there are any"
    ),
    "rollout/samples_<fate>": (
        "number of samples with each outcome: [Accounts](asynchronous.md#accounts)"
    ),
    "episode/<name>": (
        "metrics that environments or agents [report](environments.md#what-is-seen), averaged "
        "over episodes; also for `eval/`"
    ),
    "tools/calls_mean": "mean number of [tool](tools.md) calls in an episode",
    "tools/failures": "number of failed tool calls in a step",
    "train/loss": "the loss of the examples of a step",
    "train/accuracy": "share of a step's pairs, or verdicts, that the model predicts correctly",
    "kl/ref_response_mean": (
        "KL to the reference, in nats per response. An agent's whole episode counts as one response"
    ),
    "mismatch/kl": "KL between engine and learner with the same weights, in nats per token",
    "mismatch/router_disagreement": (
        "share of choices (token, layer, expert) that the learner's routers would have made "
        "differently, with `rollout.router_replay`; over the response tokens of a step's first "
        "update"
    ),
    "mismatch/unknown_tokens": "tokens for which an engine returned no log-prob (NaN)",
    "ppo/entropy": "entropy of the policy, in nats per token",
    "ppo/entropy_threshold": (
        "lowest entropy of the tokens that `ppo.top_entropy_fraction` selects, in nats"
    ),
    "ppo/clip_fraction": "share of tokens whose ratio is clipped",
    "ppo/advantage_abs_mean": "mean size of the advantages",
    "ppo/off_policy_fraction": "share of tokens that `ppo.correction.off_policy_mask` drops",
    "ppo/router_load_max": (
        "load of the busiest expert of any layer, as a multiple of an even load, over the response "
        "tokens of a step's updates, for [mixtures of experts](models.md#mixtures-of-experts); "
        "also for `train/`"
    ),
    "ppo/router_entropy": "mean entropy of their routers, in nats; also for `train/`",
    "ppo/router_aux_loss": "the loss of `learner.router_aux_coef`, without the coefficient",
    "ppo/policy_learning_rate": "the learning rate of a step; also for the critic and `train/`",
    "time/<phase>_s": "seconds of each phase; they add up to `time/step_s`",
    "time/wait_for_rollouts_s": "seconds of the step that the learner waited for rollouts",
    "perf/engine_<load>": (
        "the engines' load since the previous weight push: [Where the time "
        "goes](asynchronous.md#where-the-time-goes)"
    ),
    "perf/engine_idle_s": "mean seconds that an engine was idle",
    "perf/slowest_worker_ratio": "seconds per token of the slowest learner worker "
    "(`perf/slowest_worker`), divided by the others' median; also of engines, per step",
    "perf/draft_acceptance": "share of drafted tokens that the policy accepted "
    "(`rollout.engine.speculation`)",
    "perf/environment_s_mean": "seconds that an episode waited for its environment",
    "perf/tools_s_mean": "seconds of that wait that tools took",
    "perf/wait_for_environments_s": (
        "seconds in training without a request in flight, because episodes waited for their "
        "environments"
    ),
    "perf/<phase>_tokens_per_s": "tokens per second during a phase",
    "perf/samples_per_s": "samples per second of the whole step",
    "perf/response_tokens_per_s": "response tokens per second of the whole step",
    "perf/mfu": (
        "model FLOPs utilisation: share of the devices' peak FLOP/s that the models' "
        "computation needs"
    ),
    "perf/memory_<role>_gb": "peak RAM so far of the largest process of a role",
    "perf/gpu_memory_<role>_gb": "peak GPU memory so far of the largest process of a role",
}
"""Descriptions of metrics and families of metrics, for the documentation."""
