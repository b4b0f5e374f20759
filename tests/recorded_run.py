"""Run folders as a PPO run leaves them, written in a moment; what pages and commands read.

Some are made up (`write_run`), others are what real runs of the quickstart measured
(`write_recorded`, from recorded_runs.json). To record those again, after `make demo` and
`raypo sweep sweeps/kl_coef.yaml`:

    python -m tests.recorded_run runs/quickstart-sft runs/quickstart-reward-model runs/quickstart \\
        runs/kl_coef/trials/kl_coef-00005 runs/kl_coef/trials/kl_coef-00007
"""

import base64
import gzip
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypo.storage.rollout_table import rollout_table
from raypo.storage.run_files import RunFiles

RECORDED = Path(__file__).with_name("recorded_runs.json")
_KEPT = (
    *("rollout/score_mean", "rollout/score_std", "rollout/samples_sampled"),
    *("eval/score_mean", "eval/loss", "eval/accuracy", "train/loss"),
    *("kl/ref_response_mean", "ppo/entropy", "time/step_s"),
)
_CONFIG = ("name", "recipe", "num_steps", "model", "reward", "eval", "rollout", "ppo")

WORDS = ["<eos>", "a", "b", "c", "=", "</p>"]
CONFIG = {
    "name": "recorded",
    "recipe": "ppo",
    "num_steps": 12,
    "model": {"policy": "nowhere", "dtype": "float32"},
    "ppo": {"advantage": "gae", "kl": {"coef": 0.02}},
}


def metrics(step: int, **changes: float) -> dict[str, float]:
    """A step of a run that learns and is not remarkable."""
    rise = 1.0 - math.exp(-step / 6)
    row = {
        "rollout/score_mean": 0.2 + 0.6 * rise,
        "rollout/score_std": 0.4,
        "rollout/samples_sampled": 512.0,
        "rollout/response_tokens_mean": 5.0,
        "rollout/response_tokens_max": 6.0,
        "rollout/truncated_fraction": 0.1,
        "kl/ref_mean": 0.1 * rise,
        "kl/ref_response_mean": 0.5 * rise,
        "kl/coef": 0.02,
        "mismatch/kl": 1e-13,
        "ppo/clip_fraction": 0.05,
        "ppo/approx_kl": 0.01,
        "ppo/entropy": 0.6 - 0.3 * rise,
        "ppo/policy_loss": -0.01,
        "ppo/value_loss": 0.1,
        "time/generate_s": 0.6,
        "time/score_s": 0.2,
        "time/update_s": 1.0,
        "time/report_s": 0.2,
        "time/step_s": 2.0,
        "perf/response_tokens_per_s": 1000.0,
        "perf/generate_tokens_per_s": 4000.0,
        "perf/update_tokens_per_s": 6000.0,
        "perf/mfu": 0.2,
        "perf/update_mfu": 0.3,
        "perf/memory_learner_gb": 1.2,
        "perf/memory_engine_gb": 1.62,
    }
    if step == 1:
        row["eval/initial_score_mean"] = 0.25
    if step % 4 == 0:
        row["eval/score_mean"] = 0.25 + 0.5 * rise
    return row | changes


def rollout(step: int, group: int, sample: int) -> dict[str, Any]:
    """A response of three tokens; the group's prompt comes again in every step."""
    ids = [1 + (group + sample + step) % 3, 4, 0]
    return {
        "prompt": f"prompt {group} </script>",
        "response": f"{WORDS[ids[0]]}=",
        "label": "a",
        "prompt_ids": [5, 4],
        "response_ids": ids,
        "log_probs": [-0.1, -0.2, -0.3],
        "ref_log_probs": [-0.4, -0.1, -0.3],
        "score": float(sample) / 2 + step / 100,
        "scores_by_source": {"function": float(sample) / 2 + step / 100},
        "advantages": [0.5 - sample, 0.1, -0.2],
        "advantage_mean": 0.1,
        "kl": 0.2,
        "finish_reason": "stop",
        "weight_version": step - 1,
        "prompt_index": group,
        "sample_index": sample,
        "group_index": group,
        "row_index": 0,
    }


def episode() -> dict[str, Any]:
    """Two turns, a tool called after each; the token between them is the environment's."""
    return rollout(1, 0, 0) | {
        "response_ids": [1, 4, 2],
        "response_mask": [True, False, True],
        "turn_rewards": [0.5, 0.0, -1.0],
        "turn_index": [0, -1, 1],
        "episode": {
            "score": -0.5,
            "num_turns": 2,
            "environment_s": 0.1,
            "error": "KeyError: x",
            "metrics": {"hits": 3.0},
            "tool_uses": [
                {"name": "calculator", "seconds": 0.25, "error": None, "turn": 1},
                {"name": "", "seconds": 0.0, "error": "not JSON", "turn": 2},
            ],
        },
    }


def conversations() -> list[dict[str, Any]]:
    """An agent's episode of two conversations."""
    first = episode() | {"prompt": "first prompt", "score": -0.5, "turn_rewards": None}
    first |= {"response_mask": None, "turn_index": [0, 0, 0]}
    return [first, first | {"prompt": "second prompt", "row_index": 1}]


def held_out(step: int, group: int) -> dict[str, Any]:
    """An answer to one of four held-out prompts; from step 4 on the first three are right."""
    seen = ("ref_log_probs", "advantages", "advantage_mean", "kl")
    row = {name: value for name, value in rollout(step, group, 0).items() if name not in seen}
    return row | {"prompt": f"held out {group}", "score": float(step >= 4 and group < 3)}


def write_run(
    folder: Path,
    name: str = "recorded",
    *,
    steps: int = 12,
    with_rollouts: bool = True,
    status: str | None = "finished",
    **changes: float,
) -> Path:
    """A run folder; `changes` are figures that every step has instead.

    Args:
        status: Of the summary; None: the run has not ended.
    """
    files = RunFiles(str(folder), name)
    files.write_config(CONFIG | {"name": name})
    for step in range(1, steps + 1):
        files.append_metrics(step, metrics(step, **changes))
        if with_rollouts:
            rows = [rollout(step, group, sample) for group in range(3) for sample in range(3)]
            files.write_rollouts(step, rollout_table(rows))
    for step in (0, *range(4, steps + 1, 4)) if with_rollouts else ():
        rows = [held_out(step, group) for group in range(4)]
        files.write_rollouts(step, rollout_table(rows), held_out=True)
    if status:
        files.write_summary(
            {"status": status, "recipe": "ppo", "wall_s": 167.0, "versions": {"raypo": "0.1.0"}}
        )
    write_tokenizer(files.folder / "policy")
    return folder / name


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def page_data(html: str) -> dict[str, Any]:
    """What the page's script draws: data by block."""
    packed = html.partition('id="packed-data">')[2].partition("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def write_recorded(
    folder: Path,
    name: str,
    *,
    steps: Sequence[int] | None = None,
    status: str | None = "finished",
    held_out: Mapping[int, int] | None = None,
    **config: Any,
) -> Path:
    """What a real run measured, or a part of it.

    Args:
        name: Of a run in recorded_runs.json.
        steps: Those of the part, counted from 1 again; None: all.
        held_out: Step of the part -> step whose held-out answers it has; None: as they were.
        config: Sections to replace.
    """
    run = json.loads(RECORDED.read_text())[name]
    files = RunFiles(str(folder), name)
    files.write_config(run["config"] | config)
    for step, row in enumerate(run["rows"], start=1) if steps is None else ():
        files.append_metrics(step, row)
    for step, number in enumerate(steps or (), start=1):
        row = run["rows"][number - 1]
        files.append_metrics(
            step, {k: v for k, v in row.items() if number == 1 or "initial" not in k}
        )
    for step, recorded in (held_out or {int(s): int(s) for s in run["held_out"]}).items():
        rows = [
            rollout(step, group, sample) | {"prompt": f"held out {group}", "score": float(score)}
            for group, scores in enumerate(run["held_out"][str(recorded)])
            for sample, score in enumerate(scores)
        ]
        files.write_rollouts(step, rollout_table(rows), held_out=True)
    if status:
        versions = {"raypo": "0.1.0"}
        wall_s = sum(row["time/step_s"] for row in files.metrics()) + 30.0
        files.write_summary(
            {"status": status, "recipe": "ppo", "wall_s": wall_s, "versions": versions}
        )
    return folder / name


def record(locations: Sequence[str]) -> None:
    """Keep what verdicts are made of from run folders."""
    runs = {}
    for location in locations:
        files = RunFiles.at(location)
        config = files.config() or {}
        runs[files.name] = {
            "config": {key: config[key] for key in _CONFIG if key in config},
            "rows": [
                {
                    key: float(f"{value:.6g}")
                    for key, value in row.items()
                    if key.replace("/initial_", "/") in _KEPT
                }
                for row in files.metrics()
            ],
            "held_out": {
                step: _scores(files.rollouts(step, held_out=True))
                for step in files.rollout_steps(held_out=True)
            },
        }
    lines = (f'"{name}": {json.dumps(run)}' for name, run in runs.items())
    text = "{" + ",\n".join(lines) + "}\n"
    RECORDED.write_text(text.replace(f"{Path.cwd()}/", ""))


def _scores(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for row in rows:
        score = float(f"{row['score']:.4g}")
        groups.setdefault(row["group_index"], []).append(
            int(score) if score == int(score) else score
        )
    return [groups[group] for group in sorted(groups)]


if __name__ == "__main__":
    record(sys.argv[1:])
