"""`make bench-gpu`: raypo on one GPU beside TRL, vLLM alone and a bare PyTorch loop, in one call.

    python -m tests.benchmarks.bench_gpu [--only raypo_0.5B trl_0.5B ...] [--repeats 4] [--tiny]

All have the same work: GRPO with a KL term on a Llama of random weights in bfloat16, 32 prompts of
256 tokens x 8 samples x 512 tokens, one update a step. Every measurement is a process of its own,
one at a time. What was measured is kept in `runs/bench-gpu/<date>.json`; a second call of the same
day adds to it, and prints the whole table. `--tiny` rehearses it on this CPU, TRL where it is here.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.bench import KL_COEF, ROOT, Bench, Shape, pass_flops, random_model
from tests.benchmarks.bench import prompts_file as write_prompts
from tests.gpu.parts import most_of_the_gpu

SHAPES = {
    "0.5B": Shape(896, 24, 4864, 14, 2, vocab=151_936),
    "1.5B": Shape(1536, 28, 8960, 12, 2, vocab=151_936),
}
"""Sizes of Qwen2.5, as Llamas."""
WORK = {"prompts": 32, "samples": 8, "prompt_tokens": 256, "new_tokens": 512}
TINY = {"prompts": 2, "samples": 2, "prompt_tokens": 12, "new_tokens": 8}
TINY_SHAPE = Shape(64, 2, 128, 2, 2, vocab=512)
FRACTION = 0.4
"""Share of the GPU's memory that vLLM may take, in every tool."""
TRL_BATCH = 16
"""Responses of a micro-batch of TRL's."""
TRL = "trl[vllm]>=1.16"
TOOLS = ("vllm", "vllm-again", "raypo", "raypo-again", "trl", "bare")
"""Those with `-again` only start once more, with the caches that the first one left."""
NAMES = [f"{tool}_{shape}" for shape in SHAPES for tool in TOOLS]
Case = Mapping[str, Mapping[str, Any]]
"""Measurements of one shape, by tool."""


class GpuBench(Bench):
    """One call's measurements on a GPU, or tiny ones on this CPU."""

    def __init__(self, folder: Path, *, repeats: int, tiny: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.repeats = folder, repeats
        self.sizes = TINY if tiny else WORK
        self.shapes = dict.fromkeys(SHAPES, TINY_SHAPE) if tiny else SHAPES
        self.device = "cpu" if tiny else "cuda"

    def work_of(self, shape: str) -> dict[str, Any]:
        """Return the settings that all measurements of a shape share."""
        made = self.shapes[shape]
        model = random_model(self.folder / f"model-{shape}", made, dtype="bfloat16")
        file = write_prompts(self.folder, model, self.sizes["prompt_tokens"])
        return {
            "model": str(model),
            "prompts_file": str(file),
            "dtype": "bfloat16",
            "device": self.device,
            "fraction": FRACTION,
            "threads": os.cpu_count(),
            "vocab": made.vocab,
            "repeats": self.repeats,
            "steps": 1 + self.repeats,
            "kl_coef": KL_COEF,
            **self.sizes,
        }

    def measure(self, name: str) -> dict[str, Any]:
        """Measure what a name of `NAMES` stands for."""
        tool, shape = name.split("_")
        work = self.work_of(shape)
        first, _, again = tool.partition("-")
        self.caches = self.folder / "caches" / f"{first}_{shape}"
        if not again:
            shutil.rmtree(self.caches, ignore_errors=True)
        if again:
            work |= {"repeats": 0, "steps": 0}
        if tool == "raypo-again":
            found, _ = self.raypo_run(work)
            return {"start_s": found["start_s"]}
        if tool == "raypo":
            return self.raypo(work) | self.planned()
        if tool == "trl":
            batch = min(TRL_BATCH, work["prompts"] * work["samples"])
            return self.trl(work | {"batch": batch, "weights": "bfloat16"})
        return self.piece(first, work | {"prices": not again})

    def run_file(self, work: dict[str, Any], **sections: Any) -> Path:
        """The config of a raypo run: the defaults of a GPU."""
        engine = {"gpu_memory_fraction": work["fraction"]} if self.device == "cuda" else {}
        rollout = {
            "prompts_per_step": work["prompts"],
            "samples_per_prompt": work["samples"],
            "max_new_tokens": work["new_tokens"],
            "engine": engine,
        }
        return super().run_file(work, rollout=rollout, learner={"policy_lr": 1e-6}, **sections)

    def planned(self) -> dict[str, Any]:
        """Memory and seconds that the plan gives the run, where it knows the GPU."""
        from raypo import PPOConfig
        from raypo.cluster.hardware import this_machine
        from raypo.plan.fit import make_plan
        from raypo.plan.times import Rates, step_time

        plan = make_plan(PPOConfig.load(self.folder / "raypo.yaml"), this_machine())
        rates = Rates.of(plan)
        found = {"planned_gb": plan.loads[0].needed / 1e9}
        return found | ({"planned_s": step_time(plan, rates).seconds} if rates else {})

    def trl_python(self) -> Path:
        """This interpreter where TRL can be imported, else that of an environment made for it."""
        if importlib.util.find_spec("trl") is not None:
            return Path(sys.executable)
        python = self.folder / "trl/bin/python"
        if not (self.folder / "trl/made").exists():
            uv = Path(sys.executable).parent / "uv"
            venv = [uv, "venv", "--clear", "--python", sys.executable, python.parents[1]]
            subprocess.run(venv, check=True)
            # Not by constraints-gpu.txt: TRL 1.16 takes vLLM up to 0.31, and that pins 0.32.
            subprocess.run([uv, "pip", "install", "-q", "--python", python, TRL], check=True)
            (self.folder / "trl/made").touch()
        return python

    def _measured(self, command: list[str]) -> dict[str, Any]:
        self.caches.mkdir(parents=True, exist_ok=True)
        for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(self.caches / name.lower())
        with most_of_the_gpu(self.device) as peak:
            found = super()._measured(command)
        return found | ({"gpu_gb": peak[0] / 1e9} if self.device == "cuda" else {})


def machine(device: str) -> dict[str, Any]:
    """Return the device and versions of the measurements."""
    import torch

    from raypo.learner.peak import peak_flops
    from raypo.storage.summary import installed_versions

    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU, tiny sizes"
    return {
        "device": name,
        "peak_flops": peak_flops("bfloat16"),
        "versions": installed_versions(),
    }


class Row(NamedTuple):
    """A row of the table, and between which bounds the issue of 26 November 2026 wants it."""

    name: str
    value: Callable[[Case], float]
    least: float = -math.inf
    most: float = math.inf

    @property
    def aim(self) -> str:
        """The bounds, for people."""
        if self.least == -math.inf:
            return "" if self.most == math.inf else f"at most {self.most:g}"
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"{self.least:g} to {self.most:g}"


def part(tool: str, key: str, times: float = 1.0) -> Callable[[Case], float]:
    """A figure of a tool."""
    return lambda case: times * case[tool][key]


def ratio(above: tuple[str, str], below: tuple[str, str]) -> Callable[[Case], float]:
    """A figure of a tool by one of another."""
    return lambda case: case[above[0]][above[1]] / case[below[0]][below[1]]


def rate(tool: str, phase: str) -> Callable[[Case], float]:
    """Response tokens a second of a phase."""
    return lambda case: case["sizes"]["response_tokens"] / case[tool][phase]


def mfu(tool: str, phase: str, passes: int) -> Callable[[Case], float]:
    """Percentage of the device's peak that a phase of so many forward passes reaches."""
    return lambda case: (
        100 * passes * case["sizes"]["pass_flops"] / case["sizes"]["peak_flops"] / case[tool][phase]
    )


def other(case: Case) -> float:
    """Percentage of a raypo step that is neither sampling nor a pass of a model."""
    step = case["raypo"]
    return 100 * (1 - (step["sample_s"] + step["reference_s"] + step["update_s"]) / step["step_s"])


ROWS = [
    Row("raypo, s a step", part("raypo", "step_s"), most=4.5),
    Row("- generate", part("raypo", "generate_s")),
    Row("- of it the engine samples", part("raypo", "sample_s")),
    Row("- reference log-probs", part("raypo", "score_s")),
    Row("- old log-probs, turns of engine and learner", part("raypo", "log_probs_s")),
    Row("- update", part("raypo", "update_s")),
    Row("- push of the weights, with turns and probe", part("raypo", "push_weights_s")),
    Row("- rollouts to disk", part("raypo", "save_rollouts_s")),
    Row("- report", part("raypo", "report_s")),
    Row("the push itself, s", part("raypo", "push_s"), most=0.2),
    Row("sleep and wake of engine and frozen models, s", part("raypo", "sleep_wake_s"), most=1.5),
    Row("neither sampling nor pass, % of a step", other, most=10.0),
    Row("first step, s", part("raypo", "first_step_s"), most=8.0),
    Row("response tokens/s while sampling", rate("raypo", "sample_s")),
    Row("response tokens/s of the step", rate("raypo", "step_s")),
    Row("MFU of the update, %", mfu("raypo", "update_s", 3), least=27.0),
    Row("MFU of the reference, %", mfu("raypo", "score_s", 1)),
    Row("MFU of the step (sampling, reference, update), %", mfu("raypo", "step_s", 5)),
    Row("GPU memory, GB", part("raypo", "gpu_gb")),
    Row("GPU memory / plan", ratio(("raypo", "gpu_gb"), ("raypo", "planned_gb")), 0.8, 1.2),
    Row("seconds / plan", ratio(("raypo", "step_s"), ("raypo", "planned_s")), 0.67, 1.5),
    Row("vLLM alone, with seeds and log-probs, s", part("vllm", "generate_s")),
    Row("- with seeds only", part("vllm", "seeds_s")),
    Row("- with log-probs only", part("vllm", "log_probs_s")),
    Row("- with neither", part("vllm", "plain_s")),
    Row(
        "**vLLM alone / raypo's sampling**",
        ratio(("vllm", "generate_s"), ("raypo", "generate_s")),
        least=0.95,
    ),
    Row("price of seeds and log-probs, factor", ratio(("vllm", "generate_s"), ("vllm", "plain_s"))),
    Row("TRL, s a step", part("trl", "step_s")),
    Row("- generate", part("trl", "generate_s")),
    Row("- reference log-probs", part("trl", "reference_s")),
    Row("- update and the rest", part("trl", "update_s")),
    Row("- first step", part("trl", "first_step_s")),
    Row("TRL, GPU memory, GB", part("trl", "gpu_gb")),
    Row(
        "**raypo / TRL, samples/s**",
        ratio(("raypo", "samples_per_s"), ("trl", "samples_per_s")),
        least=2.3,
    ),
    Row("bare forward, s", part("bare", "forward_s")),
    Row("bare update, s", part("bare", "update_s")),
    Row("- of it the optimizer", part("bare", "optimizer_s")),
    Row("MFU of the bare update, %", mfu("bare", "update_s", 3)),
    Row("bare, GPU memory, GB", part("bare", "gpu_gb")),
    Row("**update in a run / bare**", ratio(("raypo", "update_s"), ("bare", "update_s"))),
    Row("start-up of raypo, cold caches, s", part("raypo", "start_s"), most=60.0),
    Row("- warm", part("raypo-again", "start_s"), most=40.0),
    Row("start-up of vLLM alone, cold caches, s", part("vllm", "start_s")),
    Row("- warm", part("vllm-again", "start_s")),
    Row("start-up of TRL, s", part("trl", "start_s")),
]


def table(known: Mapping[str, Any], shapes: Mapping[str, Shape] = SHAPES) -> str:
    """The shapes side by side, in Markdown; what was not measured is left blank."""
    lines = [["", "aim", *shapes], ["---"] * (2 + len(shapes))]
    cases = {shape: case_of(known, shape, made) for shape, made in shapes.items()}
    for row in ROWS:
        cells = []
        for case in cases.values():
            try:
                value = row.value(case)
            except (KeyError, ZeroDivisionError):
                cells.append("")
                continue
            is_met = row.least <= value <= row.most
            cells.append(f"{value:.3g}{'' if is_met else ' (missed)'}")
        lines.append([row.name, row.aim, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def case_of(known: Mapping[str, Any], shape: str, made: Shape) -> Case:
    """Return the measurements of a shape by tool; `sizes` has the counts for rates."""
    found, sizes = known.get("found", {}), known.get("work", WORK)
    case = {tool: found.get(f"{tool}_{shape}", {}) for tool in TOOLS}
    prompts, samples, new = sizes["prompts"], sizes["samples"], sizes["new_tokens"]
    flops = pass_flops(made, prompts, samples, sizes["prompt_tokens"], new)
    computed: dict[str, float] = {
        "response_tokens": prompts * samples * new,
        "pass_flops": flops,
    }
    if machine := known.get("machine"):
        computed["peak_flops"] = machine["peak_flops"]
    return case | {"sizes": computed}


def is_rehearsed(name: str) -> bool:
    """Return whether `--tiny` measures it: one shape, and TRL if this environment has it."""
    tool, shape = name.split("_")
    return shape == "0.5B" and (tool != "trl" or importlib.util.find_spec("trl") is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, and print the table of all that is known of this day."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=NAMES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=4, help="measured steps after the first")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/bench-gpu")
    parser.add_argument("--tiny", action="store_true", help="rehearse on this CPU")
    options = parser.parse_args(arguments)
    runs = options.runs / "tiny" if options.tiny else options.runs
    bench = GpuBench(runs.resolve(), repeats=options.repeats, tiny=options.tiny)
    file = runs / f"{date.today()}.json"
    known = {"machine": machine(bench.device), "work": bench.sizes, "found": {}}
    if file.exists():
        known["found"] = json.loads(file.read_text())["found"]
    names = options.only or [n for n in NAMES if not options.tiny or is_rehearsed(n)]
    for name in names:
        try:
            known["found"][name] = bench.measure(name)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            # The others are worth their time, also where TRL cannot be installed.
            print(name, "failed:", error, flush=True)
            continue
        print(name, json.dumps(known["found"][name]), flush=True)
        file.write_text(json.dumps(known, indent=1))
    print(
        f"\n{known['machine']['device']}, {date.today()}\n\n{table(known, bench.shapes)}\n\n{file}"
    )


if __name__ == "__main__":
    main()
